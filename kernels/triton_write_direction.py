"""a_t = A_t x_t with A_t = (M_0 + Σ_{s<=t} u_s u_sᵀ)⁻¹ for all tokens, and its gradient, in Triton (DESIGN §2).

A sequence is cut into stretches. Gram sums of the stretches, their prefix sums and the inverse at each stretch's start
are float64 (λ0 = 0.1 would be lost beside a sum over T tokens). From there one program walks its stretch in leaves of
16 tokens and carries A: with I + U A Uᵀ = L D Lᵀ and W = D^-1/2 L⁻¹ U A it is a = X A − tril(X Wᵀ) W and A −= Wᵀ W.
Where x is u itself, a_t = W_t D_t^-1/2, which does not cancel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_common import (LEAF, Precision, Tables, dot, feature, feature_slope, load, places, scan,
                                   token_places, unit_rows, unit_rows_gradient)


@triton.jit
def dot_wide(a, b):
    return tl.dot(a, b, out_dtype=tl.float64)


@triton.jit
def unit_columns(x):
    squared = tl.sum(x * x, 0)
    return x * tl.where(squared > 0, 1 / tl.sqrt(tl.where(squared > 0, squared, 1.0)), 0.0)[None, :]


@triton.jit
def unit_float64(x, scale):
    """Rows of length `scale` in float64: rounding a unit row to float32 would leave the span of its repetitions."""
    x = x.to(tl.float64)
    square = tl.sum(x * x, 1)
    length = tl.sqrt(tl.where(square > 0, square, 1.0))
    return x * tl.where(square > 0, scale / length, 0.0)[:, None]


@triton.jit
def round_to(x, unit):
    """The nearest multiple of 1/unit."""
    return tl.floor(x * unit + 0.5) / unit


@triton.jit
def load_direction(u, offsets, mask, scale, F: tl.constexpr, FROM_KEY: tl.constexpr, WIDE: tl.constexpr):
    """Penalty directions: rows of u (of the key's features where u is the key), normalised to `scale`."""
    x = load(u, offsets, mask)
    if FROM_KEY:
        x = feature(x, mask, F)
    if WIDE:
        return unit_float64(x, scale)
    else:
        return round_to(unit_rows(x), 32768.0) * scale


@triton.jit
def gram_kernel(u, gram, stretches, H, scale, F: tl.constexpr, FROM_KEY: tl.constexpr, D: tl.constexpr,
                C: tl.constexpr, WIDE: tl.constexpr):
    """Σ u uᵀ of a stretch, float64. A unit row in multiples of 2⁻¹⁵ is two bfloat16 rows whose products sum up exactly
    in float32, so that the sum is exactly that of the rows the other kernels use, however many they are."""
    program = tl.program_id(0).to(tl.int64)
    stretch, head = program // H, program % H
    token, end = tl.load(stretches + stretch * 3), tl.load(stretches + stretch * 3 + 1)
    total = tl.zeros([D, D], tl.float64)
    for i in range(0, (end - token + C - 1) // C):
        base, offsets, mask = places(token + i * C, end, head, H, D, C)
        if WIDE:
            U = load_direction(u + base, offsets, mask, scale, F, FROM_KEY, WIDE)
            total += dot_wide(tl.trans(U), U)
        else:
            U = load_direction(u + base, offsets, mask, 1.0, F, FROM_KEY, WIDE)
            high = round_to(U, 128.0)
            low = (U - high) * 256.0
            cross = dot(tl.trans(high), low, "bf16") * 0.00390625
            partial = dot(tl.trans(high), high, "bf16").to(tl.float64) + (cross + tl.trans(cross)).to(tl.float64)
            total += partial + (dot(tl.trans(low), low, "bf16") * 1.52587890625e-05).to(tl.float64)
    if not WIDE:
        total *= scale.to(tl.float64) * scale
    at = tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(gram + program * D * D + at, total)


@triton.jit
def inverse_kernel(matrices, inverses, D: tl.constexpr):
    """Inverses of symmetric positive definite float64 matrices by symmetric sweeps, one program a matrix."""
    program = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, D)
    r, c = line[:, None], line[None, :]
    at = program * D * D + r * D + c
    M = tl.load(matrices + at)
    for j in range(0, D):
        column = tl.sum(tl.where(c == j, M, 0.0), 1)
        row = tl.sum(tl.where(r == j, M, 0.0), 0)
        pivot = tl.sum(tl.where(line == j, row, 0.0), 0)
        factor = 1.0 / pivot
        row_factor, column_factor = row * factor, column * factor
        M = M - column[:, None] * row_factor[None, :]
        M = tl.where(r == j, row_factor[None, :], tl.where(c == j, column_factor[:, None], M))
        M = tl.where((r == j) & (c == j), -factor, M)
    tl.store(inverses + at, (-M).to(inverses.dtype.element_ty))


@triton.jit
def leaf_factor(G, N: tl.constexpr):
    """G = L D Lᵀ, [N, N]: returns L⁻¹ and 1/diag(D)."""
    line = tl.arange(0, N)
    r, c = line[:, None], line[None, :]
    R = tl.where(r == c, 1.0, 0.0)
    for j in range(0, N - 1):
        column = tl.sum(tl.where(c == j, G, 0.0), 1)
        row = tl.sum(tl.where(r == j, G, 0.0), 0)
        solved = tl.sum(tl.where(r == j, R, 0.0), 0)
        pivot = tl.sum(tl.where(line == j, column, 0.0), 0)
        factor = tl.where(line > j, column / pivot, 0.0)
        G = G - factor[:, None] * row[None, :]
        R = R - factor[:, None] * solved[None, :]
    return R, 1.0 / tl.sum(tl.where(r == c, G, 0.0), 1)


@triton.jit
def map_kernel(u, x, w, norms, inverses, out, out_norms, outer, stretches, H, scale, F: tl.constexpr,
               FROM_KEY: tl.constexpr, X: tl.constexpr, UNIT: tl.constexpr, BACKWARD: tl.constexpr, D: tl.constexpr,
               N: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, PX: tl.constexpr):
    """Walks a stretch. X says what is mapped: "u" itself, "unit" or "raw" features of x, or a "gradient" x.

    Forward: out = A_t x_t (with UNIT its direction, and its length in out_norms). Backward: x is the gradient of that
    output w; out = b = A_t da_t, and outer = Σ b aᵀ + a bᵀ over the stretch. Tokens are columns here: [D, N] tiles keep
    all warps busy where [N, D] ones would not.
    """
    program = tl.program_id(0).to(tl.int64)
    stretch, head = program // H, program % H
    token, end = tl.load(stretches + stretch * 3), tl.load(stretches + stretch * 3 + 1)
    line, leaf = tl.arange(0, D), tl.arange(0, N)
    square = line[:, None] * D + line[None, :]
    A = tl.load(inverses + program * D * D + square)
    if BACKWARD:
        total = tl.zeros([D, D], tl.float32)
    for i in range(0, (end - token + N - 1) // N):
        base_t, per_token, mask_t = token_places(token + i * N, end, head, H, N)
        base, offsets, mask = base_t * D, per_token[None, :] * D + line[:, None], mask_t[None, :]
        U = load(u + base, offsets, mask)
        if FROM_KEY:
            U = feature(U, mask, F)
        if WIDE:
            U64 = unit_columns(U.to(tl.float64)) * scale
            AU = dot_wide(A, U64).to(tl.float32)
            U = U64.to(tl.float32)
        else:
            U = round_to(unit_columns(U), 32768.0) * scale
            AU = dot(A, U, P)
        gram = dot(tl.trans(U), AU, P)
        gram = (gram + tl.trans(gram)) * 0.5 + tl.where(leaf[:, None] == leaf[None, :], 1.0, 0.0)
        R, pivots = leaf_factor(gram, N)
        Y = dot(AU, tl.trans(R), P)
        W = Y * tl.sqrt(pivots)[None, :]
        if X == "u":
            a = Y * pivots[None, :] * (1 / scale)
        else:
            V = load(x + base, offsets, mask)
            if BACKWARD:
                direction = load(w + base, offsets, mask)
                if UNIT:
                    length = tl.load(norms + base_t + per_token, mask=mask_t, other=0)
                    V = V - direction * tl.sum(V * direction, 0)[None, :]
                    V = V * tl.where(length > 0, 1 / tl.where(length > 0, length, 1.0), 0.0)[None, :]
                    direction = direction * length[None, :]
            else:
                V = feature(V, mask, F)
                if X == "unit":
                    V = unit_columns(V)
            if WIDE:
                a = dot_wide(A, V.to(tl.float64)).to(tl.float32)
            else:
                a = dot(A, V, PX)
            within = tl.where(leaf[:, None] <= leaf[None, :], dot(tl.trans(W), V, PX), 0.0)
            a -= dot(W, within, PX)
        if WIDE:
            W64 = W.to(tl.float64)
            A -= dot_wide(W64, tl.trans(W64))
        else:
            A -= dot(W, tl.trans(W), P)
        if BACKWARD:
            total += dot(a, tl.trans(direction), PX)
        elif UNIT:
            squared = tl.sum(a * a, 0)
            length = tl.sqrt(squared)
            tl.store(out_norms + base_t + per_token, length, mask=mask_t)
            a = a * tl.where(squared > 0, 1 / tl.where(squared > 0, length, 1.0), 0.0)[None, :]
        tl.store(out + base + offsets, a.to(out.dtype.element_ty), mask=mask)
    if BACKWARD:
        tl.store(outer + program * D * D + square, total + tl.trans(total))


@triton.jit
def direction_gradient_kernel(u, k, w, norms, b, later, du, dk, stretches, H, scale, F: tl.constexpr,
                              FROM_KEY: tl.constexpr, X: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr,
                              C: tl.constexpr, P: tl.constexpr):
    """du_s = −Σ_{t>=s} b_t (a_t·u_s) + a_t (b_t·u_s), walking a stretch backwards, down to the raw inputs.

    later [D, D]: Σ b aᵀ + a bᵀ of the stretches that follow. Adds to dk (the key's part of b and, where u is the key, of
    du).
    """
    program = tl.program_id(0).to(tl.int64)
    stretch, head = program // H, program % H
    token, end = tl.load(stretches + stretch * 3), tl.load(stretches + stretch * 3 + 1)
    line, chunk = tl.arange(0, D), tl.arange(0, C)
    onwards = tl.load(later + program * D * D + line[:, None] * D + line[None, :]).to(tl.float32)
    upper = chunk[:, None] <= chunk[None, :]
    steps = (end - token + C - 1) // C
    for i in range(0, steps):
        start = token + (steps - 1 - i) * C
        base, offsets, mask = places(start, end, head, H, D, C)
        raw_u = load(u + base, offsets, mask)
        features_u = feature(raw_u, mask, F) if FROM_KEY else raw_u
        U = unit_rows(features_u) * scale
        B, a = load(b + base, offsets, mask), load(w + base, offsets, mask)
        if UNIT:
            base_t, per_token, mask_t = token_places(start, end, head, H, C)
            a = a * tl.load(norms + base_t + per_token, mask=mask_t, other=0)[:, None]
        dU = dot(U, onwards, P)
        dU += dot(tl.where(upper, dot(U, tl.trans(a), P), 0.0), B, P)
        dU += dot(tl.where(upper, dot(U, tl.trans(B), P), 0.0), a, P)
        outer = dot(tl.trans(B), a, P)
        onwards += outer + tl.trans(outer)
        dU = unit_rows_gradient(features_u, dU * (-scale))
        if FROM_KEY:
            if X == "unit":
                dU += unit_rows_gradient(features_u, B)
            elif X == "raw":
                dU += B
            dU = dU * feature_slope(raw_u, F) + load(dk + base, offsets, mask)
            tl.store(dk + base + offsets, dU.to(dk.dtype.element_ty), mask=mask)
        else:
            tl.store(du + base + offsets, dU.to(du.dtype.element_ty), mask=mask)
            raw = load(k + base, offsets, mask)
            dK = unit_rows_gradient(feature(raw, mask, F), B) if X == "unit" else B
            dK = dK * feature_slope(raw, F) + load(dk + base, offsets, mask)
            tl.store(dk + base + offsets, dK.to(dk.dtype.element_ty), mask=mask)


def start_inverses(u: Tensor, M0: Tensor, table: Tables, from_key: bool, feature_map: str, scale: float,
                   precision: Precision) -> tuple[Tensor, Tensor]:
    """A at each stretch's start [NS, H, D, D] (float32, wide: float64) and M after the last token [N, H, D, D] float64.

    u [tokens, H, D] raw; M0 [N, H, D, D] float64.
    """
    heads, d = u.shape[1:]
    matrices = torch.empty(len(table.stretches), heads, d, d, dtype=torch.float64, device=u.device)
    grid = (len(table.stretches) * heads,)
    gram_kernel[grid](u, matrices, table.stretches, heads, scale, F=feature_map, FROM_KEY=from_key, D=d, C=64 if d < 128 else 32,
                      WIDE=precision.wide, num_warps=4 if d < 128 else 8)
    M_last = scan(matrices, table, 2, M0)
    inverses = matrices if precision.wide else torch.empty_like(matrices, dtype=torch.float32)
    inverse_kernel[grid](matrices, inverses, D=d, num_warps={16: 1, 32: 1, 64: 4, 128: 8}[d])
    return inverses, M_last


def apply_map(u: Tensor, x: Tensor, inverses: Tensor, table: Tables, *, from_key: bool, feature_map: str, scale: float,
              x_is: str, unit: bool, precision: Precision) -> tuple[Tensor, Tensor | None]:
    """a_t = A_t x_t, [tokens, H, D] in precision.store; with `unit` its direction, and its length [tokens, H] float32."""
    tokens, heads, d = u.shape
    out = torch.empty(tokens, heads, d, dtype=precision.store, device=u.device)
    norms = torch.empty(tokens, heads, dtype=torch.float32, device=u.device) if unit else None
    map_kernel[(len(table.stretches) * heads,)](
        u, x, None, None, inverses, out, norms, None, table.stretches, heads, scale, F=feature_map, FROM_KEY=from_key,
        X=x_is, UNIT=unit, BACKWARD=False, D=d, N=LEAF, WIDE=precision.wide, P=precision.direction, PX=precision.reading,
        num_warps=map_warps(d))
    return out, norms


def map_gradient(dw: Tensor, u: Tensor, k: Tensor, w: Tensor, norms: Tensor | None, inverses: Tensor, table: Tables,
                 dk: Tensor, dM_last: Tensor | None, *, from_key: bool, feature_map: str, scale: float, x_is: str,
                 unit: bool, precision: Precision) -> tuple[Tensor | None, Tensor]:
    """Gradient of `apply_map` and `start_inverses` for the gradient dw of the map's output w, down to the raw inputs.

    Adds the key's part to dk; returns du (None where u is the key) and dM0.
    """
    tokens, heads, d = u.shape
    b = torch.empty(tokens, heads, d, dtype=precision.store, device=u.device)
    outer = torch.empty(len(table.stretches), heads, d, d, dtype=torch.float32, device=u.device)
    grid = (len(table.stretches) * heads,)
    map_kernel[grid](u, dw, w, norms, inverses, b, None, outer, table.stretches, heads, scale, F=feature_map,
                     FROM_KEY=from_key, X="gradient", UNIT=unit, BACKWARD=True, D=d, N=LEAF, WIDE=precision.wide,
                     P=precision.direction, PX=precision.reading, num_warps=map_warps(d))
    initial = None
    if dM_last is not None:
        dM_last = (dM_last + dM_last.mT) / 2
        initial = (dM_last * -2).contiguous()
    total = scan(outer, table, 2, initial, reverse=True)
    du = None if from_key else torch.empty_like(u)
    direction_gradient_kernel[grid](u, k, w, norms, b, outer, du, dk, table.stretches, heads, scale,
                                    F=feature_map, FROM_KEY=from_key, X="unit" if x_is == "u" else x_is, UNIT=unit, D=d,
                                    C=64 if d < 128 else 32, P=precision.reading, num_warps=4 if d < 128 else 8)
    return du, total.double() * -0.5


def map_warps(d: int) -> int:
    return {16: 1, 32: 1, 64: 4, 128: 8}[d]
