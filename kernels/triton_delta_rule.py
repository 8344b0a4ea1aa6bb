"""The memory S_t = e^g S + β e wᵀ with e = v − e^g S κ, read at every token: forward, chunk-parallel.

With N = tril(D ⊙ K Wᵀ, −1), D_ts = e^{G_t − G_s}, T = (I + diag(β) N)⁻¹ and H = Sᵀ, a chunk that starts from H₀ writes
E = diag(β) e = Y − Z H₀ with Y = T diag(β) V and Z = T diag(β e^G) K. Three kernels: `solve` (T, Y, Z of all chunks),
`carry` (H₀ and E, chunk after chunk), `read` (o of all chunks). Rules that erase nothing have E = V and no `solve`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.delta_rule import LEAST_DECAY
from kernels.triton_common import (CHUNK, LEAF, Precision, Tables, dot, feature, load, places, scan, token_places,
                                   unit_rows)
from kernels.triton_write_direction import Map, mapped

FORGOTTEN = tl.constexpr(LEAST_DECAY)
SMALLEST_BETA = 1e-18  # stands in for β nearer to 0, so that e = E/β can be had back: all of E is proportional to it


@dataclass(frozen=True)
class Keys:
    """Where a rule takes its keys and queries from: raw q and k [tokens, H, Dk]; write keys w likewise, None: from k.

    unit: keys are k̂, else φ(k). erase: the rule has an erase key.
    """

    q: Tensor
    k: Tensor
    w: Tensor | None
    unit: bool
    erase: bool
    feature_map: str


@triton.jit
def load_key(k, offsets, mask, F: tl.constexpr, UNIT: tl.constexpr):
    """φ(k) of a chunk, [C, D], with UNIT of unit length."""
    x = feature(load(k, offsets, mask), mask, F)
    if UNIT:
        x = unit_rows(x)
    return x


@triton.jit
def load_decay(g, token, end, head, H, C: tl.constexpr, HAS_G: tl.constexpr):
    """G = cumsum(g) in the chunk, [C], and its last value; rows past the end repeat it. g as far as FORGOTTEN."""
    if HAS_G:
        base, offsets, mask = token_places(token, end, head, H, C)
        value = tl.load(g + base + offsets, mask=mask, other=0).to(tl.float32)
        value = tl.maximum(value, FORGOTTEN, propagate_nan=tl.PropagateNan.ALL)
        return tl.cumsum(value, 0), tl.sum(value, 0)
    else:
        return tl.zeros([C], tl.float32), 0.0


@triton.jit
def load_beta(beta, token, end, head, H, C: tl.constexpr, HAS_BETA: tl.constexpr, SMALLEST: tl.constexpr):
    """β of a chunk, [C], at least SMALLEST in size; 1 where there is none."""
    if HAS_BETA:
        base, offsets, mask = token_places(token, end, head, H, C)
        value = tl.load(beta + base + offsets, mask=mask, other=1).to(tl.float32)
        return tl.where(tl.abs(value) < SMALLEST, SMALLEST, value)
    else:
        return tl.full([C], 1.0, tl.float32)


@triton.jit
def masked_decay(x, G, keep, HAS_G: tl.constexpr):
    """keep ⊙ D ⊙ x."""
    if HAS_G:
        x = x * tl.exp(tl.where(keep, G[:, None] - G[None, :], 0.0))
    return tl.where(keep, x, 0.0)


@triton.jit
def double_blocks(T, L, r, c, level: tl.constexpr, P: tl.constexpr):
    """Inverses T of diagonal blocks of 2^level of I + L to those of twice the size. r, c: row and column numbers."""
    pair = ((r >> (level + 1)) == (c >> (level + 1))) & (((r >> level) & 1) == 1) & (((c >> level) & 1) == 0)
    return T - dot(T, dot(tl.where(pair, L, 0.0), T, P), P)


@triton.jit
def unit_lower_inverse(L, C: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """(I + L)⁻¹ of a strictly lower [C, C] by exact 2x2 block inverses, doubling the block: never powers of L.

    Up to blocks of N = 16 the diagonal blocks are worked on apart, [C/N, N, N]; the rest of [C, C] would be zeros.
    """
    block, line = tl.arange(0, C // N), tl.arange(0, N)
    own = (block[:, None] == block[None, :])[:, None, :, None]
    leaf = tl.sum(tl.where(own, tl.reshape(L, [C // N, N, C // N, N]), 0.0), 2)
    r, c = line[None, :, None], line[None, None, :]
    pair = ((r >> 1) == (c >> 1)) & ((r & 1) == 1) & ((c & 1) == 0)
    T = tl.where(r == c, 1.0, 0.0) - tl.where(pair, leaf, 0.0)
    for level in tl.static_range(1, 4):
        T = double_blocks(T, leaf, r, c, level, P)
    T = tl.reshape(tl.where(own, T[:, :, None, :], 0.0), [C, C])
    line = tl.arange(0, C)
    for level in tl.static_range(4, 6):
        T = double_blocks(T, L, line[:, None], line[None, :], level, P)
    return T


@triton.jit
def solve_kernel(k, w, v, beta, g, inverse, Y, Z, starts, factors, norms, chunks, H, F: tl.constexpr,
                 UNIT: tl.constexpr, HAS_W: tl.constexpr, PENDING: tl.constexpr, HAS_NORMS: tl.constexpr,
                 HAS_BETA: tl.constexpr, HAS_G: tl.constexpr, SMALLEST: tl.constexpr, DK: tl.constexpr,
                 DV: tl.constexpr, C: tl.constexpr, LEAF: tl.constexpr, P: tl.constexpr, SOLVE: tl.constexpr,
                 READING: tl.constexpr, KEEP: tl.constexpr):
    """Y and Z of a chunk, with KEEP also T; PENDING: also the write keys, from what the map left."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // H, program % H
    token, end = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    base, offsets, mask = places(token, end, head, H, DK, C)
    K = load_key(k + base, offsets, mask, F, UNIT)
    if PENDING:
        W = mapped(K, starts, factors, w, norms, chunk, head, H, token, end, 0, HAS_NORMS, C, DK, C, READING)
    else:
        W = load(w + base, offsets, mask) if HAS_W else K
    G, _ = load_decay(g, token, end, head, H, C, HAS_G)
    b = load_beta(beta, token, end, head, H, C, HAS_BETA, SMALLEST)
    line = tl.arange(0, C)
    N = masked_decay(dot(K, tl.trans(W), P), G, line[:, None] > line[None, :], HAS_G)
    T = unit_lower_inverse(N * b[:, None], C, LEAF, SOLVE)
    if KEEP:
        tl.store(inverse + program * C * C + line[:, None] * C + line[None, :], T.to(inverse.dtype.element_ty))
    left = b * tl.exp(G) if HAS_G else b
    tl.store(Z + base + offsets, dot(T, K * left[:, None], P).to(Z.dtype.element_ty), mask=mask)
    base, offsets, mask = places(token, end, head, H, DV, C)
    V = load(v + base, offsets, mask) * b[:, None]
    tl.store(Y + base + offsets, dot(T, V, P).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def carry_kernel(k, w, v, g, Y, Z, states, initial, final, sequences, H, F: tl.constexpr,
                 UNIT: tl.constexpr, HAS_W: tl.constexpr, ERASE: tl.constexpr, HAS_G: tl.constexpr,
                 HAS_INITIAL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
                 P: tl.constexpr):
    """Walks a sequence: H at every chunk's start to `states`, Y into E in place. A program takes BV columns of DV."""
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = DV // BV
    column = (program % blocks) * BV + tl.arange(0, BV)
    line = program // blocks
    sequence, head = line // H, line % H
    first, last = tl.load(sequences + sequence * 6), tl.load(sequences + sequence * 6 + 1)
    start, end = tl.load(sequences + sequence * 6 + 4), tl.load(sequences + sequence * 6 + 5)
    square = tl.arange(0, DK)[:, None] * DV + column[None, :]
    S = tl.zeros([DK, BV], tl.float32)
    if HAS_INITIAL:
        S += tl.load(initial + line * DK * DV + square)
    for i in range(0, last - first):
        chunk, token = first + i, start + i * C
        base, offsets, mask = places(token, end, head, H, DK, C)
        base_v = (token.to(tl.int64) * H + head) * DV
        values = (tl.arange(0, C) * (H * DV))[:, None] + column[None, :]
        tl.store(states + (chunk.to(tl.int64) * H + head) * DK * DV + square, S.to(states.dtype.element_ty))
        W = load(w + base, offsets, mask) if HAS_W else load_key(k + base, offsets, mask, F, UNIT)
        if ERASE:
            E = load(Y + base_v, values, mask) - dot(load(Z + base, offsets, mask), S, P)
            tl.store(Y + base_v + values, E.to(Y.dtype.element_ty), mask=mask)
        else:
            E = load(v + base_v, values, mask)
        if HAS_G:
            G, G_end = load_decay(g, token, end, head, H, C, HAS_G)
            E = E * tl.exp(G_end - G)[:, None]
            S = S * tl.exp(G_end)
        S += dot(tl.trans(W), E, P)
    tl.store(final + line * DK * DV + square, S)


@triton.jit
def read_kernel(q, k, w, E, g, states, z, o, scales, chunks, H, F: tl.constexpr, UNIT: tl.constexpr,
                HAS_W: tl.constexpr, HAS_G: tl.constexpr, NORMALIZED: tl.constexpr,
                FLOOR: tl.constexpr, EPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
                P: tl.constexpr):
    """o of a chunk, and the factor that took it from S q: 1/denominator (negative: the floor) or 1/rms."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // H, program % H
    token, end = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    base, offsets, mask = places(token, end, head, H, DK, C)
    line, key = tl.arange(0, C), tl.arange(0, DK)
    lower = line[:, None] >= line[None, :]
    W = load(w + base, offsets, mask) if HAS_W else load_key(k + base, offsets, mask, F, UNIT)
    Q = feature(load(q + base, offsets, mask), mask, F)
    G, _ = load_decay(g, token, end, head, H, C, HAS_G)
    weights = masked_decay(dot(Q, tl.trans(W), P), G, lower, HAS_G)
    start = tl.load(states + program * DK * DV + key[:, None] * DV + tl.arange(0, DV)[None, :])
    out = dot(Q, start, P)
    if HAS_G:
        out = out * tl.exp(G)[:, None]
    base_v, values, mask_v = places(token, end, head, H, DV, C)
    out += dot(weights, load(E + base_v, values, mask_v), P)
    if NORMALIZED:
        K = feature(load(k + base, offsets, mask), mask, F)
        denominator = tl.sum(Q * tl.load(z + program * DK + key)[None, :], 1)
        denominator += tl.sum(tl.where(lower, dot(Q, tl.trans(K), P), 0.0), 1)
        scale = 1 / tl.maximum(denominator, FLOOR)
        out = out * scale[:, None]
        scale = tl.where(denominator >= FLOOR, scale, -scale)
    else:
        scale = tl.rsqrt(tl.sum(out * out, 1) / DV + EPS)
        out = out * scale[:, None]
    base, offsets, mask = token_places(token, end, head, H, C)
    tl.store(scales + base + offsets, scale, mask=mask)
    tl.store(o + base_v + values, out.to(o.dtype.element_ty), mask=mask_v)


@triton.jit
def key_sum_kernel(k, sums, chunks, H, F: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Σ φ(k) of a chunk."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // H, program % H
    token, end = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    base, offsets, mask = places(token, end, head, H, D, C)
    x = feature(load(k + base, offsets, mask), mask, F)
    tl.store(sums + program * D + tl.arange(0, D), tl.sum(x, 0))


@dataclass(frozen=True)
class Memory:
    """What the forward pass leaves for the backward pass. inverse, Z: None for rules without erasing (E is v then)."""

    inverse: Tensor | None
    Z: Tensor | None
    E: Tensor
    states: Tensor
    z: Tensor | None
    scales: Tensor


def warps(dk: int, dv: int) -> int:
    """Of a kernel that works on one chunk."""
    return 8 if max(dk, dv) == 128 else 4


def stages(dk: int, dv: int, precision: Precision) -> int:
    """How far the sequential passes load ahead: two chunks where shared memory allows."""
    return 1 if precision.store == torch.float32 and max(dk, dv) == 128 else 2


def value_block(dv: int, programs: int, device: torch.device) -> int:
    """Columns of the state a program of the sequential pass takes: few enough that all processors have work."""
    block = min(dv, 64)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    while block > 16 and programs * (dv // block) < 1.9 * processors:
        block //= 2
    return block


def memory_forward(keys: Keys, v: Tensor, beta: Tensor | None, g: Tensor | None, S0: Tensor | None, z0: Tensor | None,
                   normalized: bool, table: Tables, precision: Precision, floor: float, eps: float, write: Map | None,
                   keep: bool):
    """o [tokens, H, Dv], H after the last token [N, H, Dk, Dv], z likewise [N, H, Dk] or None, and the `Memory`.

    v [tokens, H, Dv]; beta, g [tokens, H]; S0 [N, H, Dk, Dv] (transposed!) and z0 [N, H, Dk] float32 or None for zero.
    write: the map to the write keys, if any; where it is pending, w is filled here. keep: for a backward pass.
    """
    tokens, heads, dk = keys.k.shape
    dv, device, count = v.shape[-1], v.device, len(table.chunks)
    grid, nw = (count * heads,), 4 if precision.memory == "bf16" else warps(dk, dv)
    key_options = dict(F=keys.feature_map, UNIT=keys.unit, HAS_W=keys.w is not None)
    sizes = dict(DK=dk, DV=dv, C=CHUNK)
    inverse = Z = None
    E = v
    if keys.erase:
        if keep:
            inverse = torch.empty(count * heads, CHUNK, CHUNK, dtype=precision.store, device=device)
        E = torch.empty(tokens, heads, dv, dtype=precision.store, device=device)
        Z = torch.empty(tokens, heads, dk, dtype=precision.store, device=device)
        pending = write is not None and write.pending
        registers = None  # a thread; with fewer, more programs share a processor
        if precision.memory == "bf16" and max(dk, dv) < 128:
            registers = 168 if pending else 128
        rest = (write.starts, write.factors, write.norms) if pending else (None, None, None)
        solve_kernel[grid](keys.k, keys.w, v, beta, g, inverse, E, Z, *rest, table.chunks, heads, **key_options,
                           **sizes, PENDING=pending, HAS_NORMS=rest[2] is not None, KEEP=keep,
                           HAS_BETA=beta is not None, HAS_G=g is not None, SMALLEST=SMALLEST_BETA, LEAF=LEAF,
                           READING=precision.reading, P=precision.memory, SOLVE=precision.solve, num_warps=nw,
                           maxnreg=registers)
    states = torch.empty(count, heads, dk, dv, dtype=precision.store, device=device)
    final = torch.empty(len(table.sequences), heads, dk, dv, dtype=torch.float32, device=device)
    lines = len(table.sequences) * heads
    block = value_block(dv, lines, device)
    carry_kernel[(lines * (dv // block),)](
        keys.k, keys.w, v, g, E, Z, states, S0, final, table.sequences, heads, **key_options, **sizes,
        ERASE=keys.erase, HAS_G=g is not None, HAS_INITIAL=S0 is not None, BV=block, P=precision.memory,
        num_warps=4, num_stages=stages(dk, dv, precision))
    z = z_last = None
    if normalized:
        z = torch.empty(count, heads, dk, dtype=torch.float32, device=device)
        key_sum_kernel[grid](keys.k, z, table.chunks, heads, F=keys.feature_map, D=dk, C=CHUNK, num_warps=4)
        z_last = scan(z, table, 0, z0)
    o = torch.empty(tokens, heads, dv, dtype=v.dtype, device=device)
    scales = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    read_kernel[grid](keys.q, keys.k, keys.w, E, g, states, z, o, scales, table.chunks, heads, **key_options,
                      **sizes, HAS_G=g is not None, NORMALIZED=normalized, FLOOR=floor,
                      EPS=eps, P=precision.memory, num_warps=nw)
    return o, final, z_last, Memory(inverse, Z, E, states, z, scales)
