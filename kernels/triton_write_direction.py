"""a_t = A_t x_t with A_t = (M_0 + Σ_{s<=t} u_s u_sᵀ)⁻¹ for all tokens, and its gradient, in Triton.

A sequence is cut into stretches; `triton_stretch_starts` has A at their starts. From there one program walks its
stretch in leaves of 16 tokens and carries A: with I + U A Uᵀ = L D Lᵀ and W = D^-1/2 L⁻¹ U A it is A −= Wᵀ W. It leaves
W and A at every chunk's start, so that the map itself, a = X A − tril(X Wᵀ) W, and all of the backward pass run over
chunks in parallel. Where x is u, a_t = W_t D_t^-1/2, which does not cancel.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_common import (CHUNK, LEAF, Precision, Tables, dot, dot_apart, dot_onto, dot_wide, feature,
                                   feature_slope, load, places, scan, token_places, unit_rows, unit_rows_gradient)
from kernels.triton_stretch_starts import STEPS, from_grid, stretch_starts


@triton.jit
def leaf_factor(G, N: tl.constexpr):
    """G = L D Lᵀ, [N, N], symmetric: returns L⁻ᵀ and 1/diag(D). Two columns a step: a step waits on reductions.

    Only sums along rows: in a matmul's layout they take a third of the exchanges that sums down columns do. So L⁻¹ is
    kept transposed, and what was eliminated stays in G, where no later step reads it.
    """
    line = tl.arange(0, N)
    r, c = line[:, None], line[None, :]
    R = tl.where(r == c, 1.0, 0.0 * G)  # in G's layout
    for j in tl.static_range(0, N, 2):
        first, second = tl.sum(tl.where(c == j, G, -0.0), 1), tl.sum(tl.where(c == j + 1, G, -0.0), 1)
        solved, next_solved = tl.sum(tl.where(c == j, R, -0.0), 1), tl.sum(tl.where(c == j + 1, R, -0.0), 1)
        pivot = tl.sum(tl.where(line == j, first, -0.0), 0)
        across = tl.sum(tl.where(line == j + 1, first, -0.0), 0)
        next_pivot = tl.sum(tl.where(line == j + 1, second, -0.0), 0)
        inverse = 1 / pivot
        ratio = across * inverse
        next_pivot -= ratio * across
        factor = tl.where(line > j, first * inverse, 0.0)
        next_factor = tl.where(line > j + 1, (second - factor * across) * (1 / next_pivot), 0.0)
        next_solved -= ratio * solved
        row, next_row = factor[None, :], next_factor[None, :]
        G = G - factor[:, None] * (row * pivot) - next_factor[:, None] * (next_row * next_pivot)
        R = R - solved[:, None] * row - next_solved[:, None] * next_row
    return R, 1 / tl.sum(tl.where(r == c, G, 0.0), 1)


@triton.jit
def factor_kernel(directions, inverses, starts, factors, out, norms, stretches, H, SCALE: tl.constexpr,
                  SAME: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
                  WIDE: tl.constexpr, P: tl.constexpr, NARROW: tl.constexpr):
    """Walks a stretch: A at every chunk's start to `starts`, W to `factors`; SAME: also the map of u itself.

    Tokens are columns here: [D, N] tiles keep all warps busy where [N, D] ones would not. The next leaf is loaded while
    this one is worked on, for nothing else hides that latency. NARROW: the precision of matmuls whose first factor has
    rows of N entries, sums over a leaf; P: of the others.
    """
    program = tl.program_id(0).to(tl.int64)
    stretch, head = program // H, program % H
    token, end = tl.load(stretches + stretch * 3), tl.load(stretches + stretch * 3 + 1)
    chunk = tl.load(stretches + stretch * 3 + 2)
    line, leaf = tl.arange(0, D), tl.arange(0, N)
    square = line[:, None] * D + line[None, :]
    A = tl.load(inverses + program * D * D + square)
    base, per_token, mask = token_places(token, end, head, H, N)
    columns = per_token[None, :] * D + line[:, None]
    ahead = tl.load(directions + base * D + columns, mask=mask[None, :], other=0)
    for i in range(0, (end - token + C - 1) // C):
        tl.store(starts + ((chunk + i).to(tl.int64) * H + head) * (D * D) + square, A)
        for j in range(0, C // N):
            U, base_now, mask_now = ahead if WIDE else from_grid(ahead), base, mask
            base, _, mask = token_places(token + i * C + (j + 1) * N, end, head, H, N)
            ahead = tl.load(directions + base * D + columns, mask=mask[None, :], other=0)
            eye = tl.where(leaf[:, None] == leaf[None, :], 1.0, 0.0)
            if WIDE:
                AU = dot_wide(A, U)
                R, pivots = leaf_factor(dot_wide(tl.trans(U), AU) + eye, N)
                Y = dot_wide(AU, R)
            else:
                AU = dot(A, U, P, SHORT=2) * (SCALE / STEPS)
                R, pivots = leaf_factor(dot_apart(tl.trans(U), AU, P, SHORT=1) * (SCALE / STEPS) + eye, N)
                Y = dot_apart(AU, R, NARROW)
            W = Y * tl.sqrt(pivots)[None, :]
            tl.store(factors + base_now * D + columns, W, mask=mask_now[None, :])
            if SAME:
                a = (Y * (pivots * (1 / SCALE))[None, :]).to(tl.float32)
                if UNIT:
                    squared = tl.sum(a * a, 0)
                    length = tl.sqrt(squared)
                    tl.store(norms + base_now + per_token, length, mask=mask_now)
                    a = a * tl.where(squared > 0, 1 / tl.where(squared > 0, length, 1.0), 0.0)[None, :]
                tl.store(out + base_now * D + columns, a.to(out.dtype.element_ty), mask=mask_now[None, :])
            if WIDE:
                A -= dot_wide(W, tl.trans(W))
            else:
                A = dot_onto(A, W, tl.trans(-W), NARROW)


@triton.jit
def later_tokens(V, factors, H, head, token, end, first, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
                 P: tl.constexpr):
    """tril(V Wᵀ) W for R rows V of a chunk, `first` of which come before them. Where V is float64, so is all of it."""
    base, offsets, mask = places(token, end, head, H, D, C)
    W = tl.load(factors + base + offsets, mask=mask, other=0)
    lower = first + tl.arange(0, R)[:, None] >= tl.arange(0, C)[None, :]
    if V.dtype == tl.float64:
        return dot_wide(tl.where(lower, dot_wide(V, tl.trans(W)), 0.0), W)
    else:
        return dot(tl.where(lower, dot(V, tl.trans(W), P), 0.0), W, P)


@triton.jit
def mapped(V, starts, factors, out, norms, chunk, head, H, token, end, first, UNIT: tl.constexpr, R: tl.constexpr,
           D: tl.constexpr, C: tl.constexpr, P: tl.constexpr):
    """A_t x_t for R rows V of a chunk, `first` of which come before them, as stored to `out`; with UNIT its direction,
    and its length to `norms`. Where V is float64, A is too, and the difference, of which 1/λ0 cancels."""
    line = tl.arange(0, D)
    start = tl.load(starts + (chunk * H + head) * D * D + line[:, None] * D + line[None, :])
    if V.dtype == tl.float64:
        a = (dot_wide(V, start) - later_tokens(V, factors, H, head, token, end, first, R, D, C, P)).to(tl.float32)
    else:
        a = dot(V, tl.trans(start), P)  # A is symmetric, and tf32 matmuls want it by columns
        a -= later_tokens(V, factors, H, head, token, end, first, R, D, C, P)
    if UNIT:
        squared = tl.sum(a * a, 1)
        length = tl.sqrt(squared)
        base, per_token, mask = token_places(token + first, end, head, H, R)
        tl.store(norms + base + per_token, length, mask=mask)
        a = a * tl.where(squared > 0, 1 / tl.where(squared > 0, length, 1.0), 0.0)[:, None]
    a = a.to(out.dtype.element_ty)
    base, offsets, mask = places(token + first, end, head, H, D, R)
    tl.store(out + base + offsets, a, mask=mask)
    return a.to(tl.float32)


@triton.jit
def map_kernel(x, starts, factors, out, norms, chunks, H, F: tl.constexpr, RAW: tl.constexpr, UNIT: tl.constexpr,
               D: tl.constexpr, C: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr):
    """out = A_t x_t for R rows of a chunk and the features of x, unit ones unless RAW; UNIT as above."""
    parts: tl.constexpr = C // R
    program = tl.program_id(0).to(tl.int64)
    first, program = (program % parts).to(tl.int32) * R, program // parts
    chunk, head = program // H, program % H
    token, end = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    base, offsets, mask = places(token + first, end, head, H, D, R)
    V = feature(load(x + base, offsets, mask), mask, F)
    if WIDE:
        V = V.to(tl.float64)
    if not RAW:
        V = unit_rows(V)
    mapped(V, starts, factors, out, norms, chunk, head, H, token, end, first, UNIT, R, D, C, P)


@triton.jit
def map_gradient_kernel(dw, w, norms, starts, factors, b, outer, chunks, H, UNIT: tl.constexpr, D: tl.constexpr,
                        C: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """b = A_t da_t for the gradient dw of the map's result w, R rows at once; outer = Σ b aᵀ + a bᵀ over the chunk."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // H, program % H
    token, end = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    line = tl.arange(0, D)
    square = program * D * D + line[:, None] * D + line[None, :]
    half = tl.zeros([D, D], tl.float32)
    for first in tl.static_range(0, C, R):
        base, offsets, mask = places(token + first, end, head, H, D, R)
        V, a = load(dw + base, offsets, mask), load(w + base, offsets, mask)
        if UNIT:
            base_t, per_token, mask_t = token_places(token + first, end, head, H, R)
            length = tl.load(norms + base_t + per_token, mask=mask_t, other=0)
            V = V - a * tl.sum(V * a, 1)[:, None]
            V = V * tl.where(length > 0, 1 / tl.where(length > 0, length, 1.0), 0.0)[:, None]
            a = a * length[:, None]
        start = tl.load(starts + square)
        if start.dtype == tl.float64:
            V = V.to(tl.float64)
            B = (dot_wide(V, start) - later_tokens(V, factors, H, head, token, end, first, R, D, C, P)).to(tl.float32)
        else:
            B = dot(V, start, P)
            B -= later_tokens(V, factors, H, head, token, end, first, R, D, C, P)
        tl.store(b + base + offsets, B.to(b.dtype.element_ty), mask=mask)
        half = dot_onto(half, tl.trans(B), a, P)
    tl.store(outer + square, half + tl.trans(half))


@triton.jit
def direction_gradient_kernel(u, k, w, norms, b, later, du, dk, chunks, H, F: tl.constexpr, FROM_KEY: tl.constexpr,
                              RAW: tl.constexpr, UNIT: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr,
                              C: tl.constexpr, P: tl.constexpr):
    """du_s = −Σ_{t>=s} b_t (a_t·u_s) + a_t (b_t·u_s) of a chunk, and b as the key's gradient, down to the raw inputs.

    later [D, D]: Σ b aᵀ + a bᵀ of the chunks that follow. Adds to dk the key's part of b, and of du where u is the key.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // H, program % H
    token, end = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    line, place = tl.arange(0, D), tl.arange(0, C)
    base, offsets, mask = places(token, end, head, H, D, C)
    raw_u = load(u + base, offsets, mask)
    features_u = feature(raw_u, mask, F) if FROM_KEY else raw_u
    U = unit_rows(features_u) * SCALE
    onwards = tl.load(later + program * D * D + line[:, None] * D + line[None, :])
    dU = dot(U, onwards, P)
    B, a = load(b + base, offsets, mask), load(w + base, offsets, mask)
    if UNIT:
        base_t, per_token, mask_t = token_places(token, end, head, H, C)
        a = a * tl.load(norms + base_t + per_token, mask=mask_t, other=0)[:, None]
    upper = place[:, None] <= place[None, :]
    dU += dot(tl.where(upper, dot(U, tl.trans(a), P), 0.0), B, P)
    dU += dot(tl.where(upper, dot(U, tl.trans(B), P), 0.0), a, P)
    dU = unit_rows_gradient(features_u, dU * (-SCALE))
    if FROM_KEY:
        dU += B if RAW else unit_rows_gradient(features_u, B)
        dU = dU * feature_slope(raw_u, F) + load(dk + base, offsets, mask)
        tl.store(dk + base + offsets, dU.to(dk.dtype.element_ty), mask=mask)
    else:
        tl.store(du + base + offsets, dU.to(du.dtype.element_ty), mask=mask)
        raw = load(k + base, offsets, mask)
        dK = B if RAW else unit_rows_gradient(feature(raw, mask, F), B)
        dK = dK * feature_slope(raw, F) + load(dk + base, offsets, mask)
        tl.store(dk + base + offsets, dK.to(dk.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Map:
    """The map's result and what its gradient needs.

    w [tokens, H, D] = A_t x_t in precision.store, for rule "unit" its direction, with the lengths in norms [tokens, H]
    float32 (else None). starts [NC, H, D, D], A at the chunks' starts, and factors [tokens, H, D], W: float32, or
    float64 where A is. pending: w and norms are still to be filled, by `mapped`.
    """

    w: Tensor
    norms: Tensor | None
    starts: Tensor
    factors: Tensor
    pending: bool = False


def stretch_tokens(tokens: int, heads: int, d: int) -> int:
    """Tokens a stretch: long ones need few inverses, short ones give every processor its share of sequential work."""
    length, programs = 32 * CHUNK, 480 if d < 128 else 120  # four to a processor, or one
    while length > 4 * CHUNK and tokens * heads < programs * length:
        length //= 2
    return length


def rows_at_once(d: int, wide: bool) -> int:
    return CHUNK // 2 if wide and d == 128 else CHUNK  # a float64 A of 128 x 128 leaves no more room


def map_forward(k: Tensor, u: Tensor | None, M0: Tensor, table: Tables, *, feature_map: str, scale: float, raw: bool,
                unit: bool, precision: Precision, fused: bool = False) -> tuple[Map, Tensor]:
    """The map, and M after the last token [N, H, D, D] float64.

    k, u [tokens, H, D] raw (u None: the unit key); x = k̂, or φ(k) where raw; M0 float64 [N, H, D, D], or [H]
    for multiples of the identity. fused: what runs over chunks anyway may be left to the caller's next kernel
    (`Map.pending`).
    """
    tokens, heads, d = k.shape
    from_key, device = u is None, k.device
    same = from_key and not raw
    directions, inverses, M_last = stretch_starts(
        k if from_key else u, M0, table, feature_map=feature_map, from_key=from_key, scale=scale, wide=precision.wide)
    starts = torch.empty(len(table.chunks), heads, d, d, dtype=inverses.dtype, device=device)
    factors = torch.empty(tokens, heads, d, dtype=inverses.dtype, device=device)
    out = torch.empty(tokens, heads, d, dtype=precision.store, device=device)
    norms = torch.empty(tokens, heads, dtype=torch.float32, device=device) if unit else None
    # Eight warps multiply by other instructions, which Triton 3.6 gets wrong for narrow bfloat16 rows (README).
    narrow = "tf32x3" if d == 128 and precision.direction == "bf16x3" else precision.direction
    factor_kernel[(len(table.stretches) * heads,)](
        directions, inverses, starts, factors, out, norms, table.stretches, heads, SCALE=scale, D=d,
        WIDE=precision.wide, SAME=same, UNIT=unit, C=CHUNK, N=LEAF, P=precision.direction, NARROW=narrow,
        num_warps={16: 1, 32: 1, 64: 2, 128: 8}[d])
    pending = fused and not (same or raw or precision.wide)
    if not (same or pending):
        rows = rows_at_once(d, precision.wide)
        x = k.float() if precision.wide else k  # as in `stretch_starts`
        map_kernel[(len(table.chunks) * heads * (CHUNK // rows),)](
            x, starts, factors, out, norms, table.chunks, heads, F=feature_map, RAW=raw, UNIT=unit, D=d, C=CHUNK,
            R=rows, WIDE=precision.wide, P=precision.reading, num_warps=4 if d < 128 else 8)
    return Map(out, norms, starts, factors, pending), M_last


def map_backward(dw: Tensor, k: Tensor, u: Tensor | None, x: Map, table: Tables, dk: Tensor, dM_last: Tensor | None, *,
                 diagonal: bool, feature_map: str, scale: float, raw: bool, unit: bool,
                 precision: Precision) -> tuple[Tensor | None, Tensor]:
    """Gradient of `map_forward` for dw and dM_last, down to the raw inputs: adds the key's part to dk, returns du (None
    where u is the key) and dM0 float64, [N, H, D, D] or where M0 was `diagonal` [H]."""
    tokens, heads, d = k.shape
    b = torch.empty(tokens, heads, d, dtype=precision.store, device=k.device)
    outer = torch.empty(len(table.chunks), heads, d, d, dtype=torch.float32, device=k.device)
    grid, nw = (len(table.chunks) * heads,), 4 if d < 128 else 8
    wide = x.starts.dtype == torch.float64
    read = [y.float() if wide else y for y in (dw, x.w)]  # as in `stretch_starts`
    map_gradient_kernel[grid](*read, x.norms, x.starts, x.factors, b, outer, table.chunks, heads, UNIT=unit, D=d,
                              C=CHUNK, R=rows_at_once(d, wide), P=precision.reading, num_warps=nw)
    initial = None if dM_last is None else (-dM_last - dM_last.mT).contiguous()
    total = scan(outer, table, 0, initial, reverse=True)
    du = None if u is None else torch.empty_like(u)
    direction_gradient_kernel[grid](k if u is None else u, k, x.w, x.norms, b, outer, du, dk, table.chunks, heads,
                                    F=feature_map, FROM_KEY=u is None, RAW=raw, UNIT=unit, SCALE=scale, D=d, C=CHUNK,
                                    P=precision.reading, num_warps=nw)
    if diagonal:
        total = total.diagonal(dim1=-2, dim2=-1).double().sum((0, 2))
    return du, total.double() * -0.5
