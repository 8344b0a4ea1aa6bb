"""A at the start of every stretch of tokens, from scratch: Gram sums of the unit directions, prefix sums, inverses.

All sums and inverses are float64: λ0 = 0.1 would be lost beside a sum over T tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_common import INTERPRETED, Tables, dot_onto, dot_wide, feature, scan, token_places


@triton.jit
def round_to(x, unit):
    """The nearest multiple of 1/unit."""
    return tl.floor(x * unit + 0.5) / unit


@triton.jit
def on_grid(x):
    """The nearest multiple of 2⁻¹⁵ in [-1, 1)."""
    return tl.minimum(round_to(x, 32768.0), 32767.0 / 32768.0)


@triton.jit
def to_grid(x):
    """Such multiples as 16 bit integers. By adding 3 · 2²², for conversions run at a quarter of the rate of additions."""
    return ((x * 32768.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int16)


@triton.jit
def from_grid(x):
    return ((x.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0) * (1 / 32768)


@triton.jit
def inverse_column_norm(x):
    squared = tl.sum(x * x, 0)
    return tl.where(squared > 0, 1 / tl.sqrt(tl.where(squared > 0, squared, 1.0)), 0.0)[None, :]


@triton.jit
def direction_rows(x, mask, F: tl.constexpr, FROM_KEY: tl.constexpr, WIDE: tl.constexpr):
    """Penalty directions of N tokens (columns) from what was loaded, not yet of unit length: float64 where WIDE."""
    x = x.to(tl.float32)
    if FROM_KEY:
        x = feature(x, mask, F)
    return x.to(tl.float64) if WIDE else x


@triton.jit
def gram_kernel(u, directions, gram, stretches, H, F: tl.constexpr, FROM_KEY: tl.constexpr, SCALE: tl.constexpr,
                D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
                EXACT: tl.constexpr):
    """The unit directions of a stretch, and R rows of their Σ u uᵀ in float64.

    Directions are float64 times SCALE, or multiples of 2⁻¹⁵ (`to_grid`): rounding a unit vector to float32 would leave the
    span of its repetitions, on the coarse grid sums are exact. Such a vector is a pair of bfloat16 vectors whose products sum
    up exactly in float32 for GROUP * C = 256 tokens at least, so the sum is exactly that of the directions. EXACT: "bf16",
    or "ieee" where that is not modelled.
    """
    parts: tl.constexpr = D // R
    program = tl.program_id(0).to(tl.int64)
    first, program = (program % parts).to(tl.int32) * R, program // parts
    stretch, head = program // H, program % H
    token, end = tl.load(stretches + stretch * 3), tl.load(stretches + stretch * 3 + 1)
    line = tl.arange(0, D)
    row = first + tl.arange(0, R)
    total = tl.zeros([R, D], tl.float64)
    base, per_token, mask = token_places(token, end, head, H, C)
    columns = per_token[None, :] * D + line[:, None]
    some = per_token[None, :] * D + row[:, None]
    ahead = tl.load(u + base * D + columns, mask=mask[None, :], other=0)
    ahead_rows = tl.load(u + base * D + some, mask=mask[None, :], other=0) if R < D else ahead
    for i in range(0, (end - token + GROUP * C - 1) // (GROUP * C)):
        large = tl.zeros([R, D], tl.float32)
        middle = tl.zeros([R, D], tl.float32)
        small = tl.zeros([R, D], tl.float32)
        for j in range(0, GROUP):
            at, mask_now, x, y = base, mask, ahead, ahead_rows
            base, _, mask = token_places(token + (i * GROUP + j + 1) * C, end, head, H, C)
            ahead = tl.load(u + base * D + columns, mask=mask[None, :], other=0)
            ahead_rows = tl.load(u + base * D + some, mask=mask[None, :], other=0) if R < D else ahead
            U = direction_rows(x, mask_now[None, :], F, FROM_KEY, WIDE)
            scale = inverse_column_norm(U)
            U = U * scale
            V = direction_rows(y, mask_now[None, :], F, FROM_KEY, WIDE) * scale if R < D else U
            if WIDE:
                total += dot_wide(V, tl.trans(U))
            else:
                U, V = on_grid(U), on_grid(V)
                high, high_rows = round_to(U, 128.0), round_to(V, 128.0)
                low, low_rows = (U - high) * 256.0, (V - high_rows) * 256.0
                large = dot_onto(large, high_rows, tl.trans(high), EXACT)
                middle = dot_onto(middle, high_rows, tl.trans(low), EXACT)
                if R < D:  # else it is the transpose
                    middle = dot_onto(middle, low_rows, tl.trans(high), EXACT)
                small = dot_onto(small, low_rows, tl.trans(low), EXACT)
            if WIDE:
                tl.store(directions + at * D + some, V * SCALE, mask=mask_now[None, :])
            else:
                tl.store(directions + at * D + some, to_grid(V), mask=mask_now[None, :])
        if not WIDE:
            if R == D:
                middle += tl.trans(middle)
            total += large.to(tl.float64) + (middle * 0.00390625).to(tl.float64)
            total += (small * 1.52587890625e-05).to(tl.float64)
    tl.store(gram + program * D * D + row[:, None] * D + line[None, :], total * (SCALE * SCALE))


@triton.jit
def inverse_kernel(matrices, inverses, D: tl.constexpr, AXIS: tl.constexpr):
    """Inverses of symmetric positive definite float64 matrices by symmetric sweeps, one program a matrix.

    A sweep of column c with pivot p is M − x xᵀ/p − 2 e eᵀ for x = c − e: no case for row and column of the pivot, and
    the last term, which no later sweep reads, is left to the end. After all sweeps M has become −M⁻¹. Where p is large
    the row c/p comes out of a cancellation, p times float64's rounding: 1e-10 after a million tokens. A step sweeps two
    columns, for its latency is that of the exchanges: rows (AXIS 0) take fewer where few warps share M.
    """
    program = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, D)
    r, c = line[:, None], line[None, :]
    at = r * D + c
    along = r if AXIS == 0 else c
    M = tl.load(matrices + program * D * D + at)
    for i in range(0, D // 2):
        j = 2 * i
        first = tl.sum(tl.where(along == j, M, 0.0), AXIS)
        second = tl.sum(tl.where(along == j + 1, M, 0.0), AXIS)
        pivot = tl.sum(tl.where(line == j, first, 0.0), 0)
        across = tl.sum(tl.where(line == j + 1, first, 0.0), 0)
        first = tl.where(line == j, first - 1.0, first)
        scaled = first * (1.0 / pivot)
        second -= scaled * across
        next_pivot = tl.sum(tl.where(line == j + 1, second, 0.0), 0)
        second = tl.where(line == j + 1, second - 1.0, second)
        M = M - first[:, None] * scaled[None, :] - second[:, None] * (second * (1.0 / next_pivot))[None, :]
    M = tl.where(r == c, 2.0 - M, -M)
    tl.store(inverses + program * D * D + at, M.to(inverses.dtype.element_ty))


def stretch_starts(u: Tensor, M0: Tensor, table: Tables, *, feature_map: str, from_key: bool, scale: float,
                   wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unit directions [tokens, H, D], A at the stretches' starts [NS, H, D, D], M after the last token [N, H, D, D] float64.

    Directions are `to_grid` and A float32, or where wide directions times scale and A float64.

    u [tokens, H, D]: raw directions, or where from_key raw keys, whose features are the directions; M0 [N, H, D, D]
    or, for multiples of the identity, [H], float64.
    """
    tokens, heads, d = u.shape
    grid, rows = (len(table.stretches) * heads,), min(d, 64)
    matrices = torch.empty(len(table.stretches), heads, d, d, dtype=torch.float64, device=u.device)
    directions = torch.empty(tokens, heads, d, dtype=torch.float64 if wide else torch.int16, device=u.device)
    if wide:
        u = u.float()  # Triton 3.6 compiles no float64 matmul of what it loads as bfloat16
    gram_kernel[(grid[0] * (d // rows),)](
        u, directions, matrices, table.stretches, heads, F=feature_map, FROM_KEY=from_key, SCALE=scale, D=d, R=rows,
        C=32 if d < 128 else 64, GROUP=8 if d < 128 else 4, WIDE=wide, EXACT="ieee" if INTERPRETED else "bf16",
        num_warps=4 if d < 128 else 8)
    M_last = scan(matrices, table, 2, M0)
    inverses = matrices if wide else torch.empty_like(matrices, dtype=torch.float32)
    inverse_kernel[grid](matrices, inverses, D=d, AXIS=0 if d < 128 else 1, num_warps={16: 1, 32: 1, 64: 2, 128: 8}[d])
    return directions, inverses, M_last
