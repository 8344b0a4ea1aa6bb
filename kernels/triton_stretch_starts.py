"""A at the start of every stretch of tokens, from scratch: Gram sums of the unit directions, prefix sums, inverses.

All sums and inverses are float64: λ0 = 0.1 would be lost beside a sum over T tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_common import INTERPRETED, Tables, dot_onto, dot_wide, feature, scan, token_places

WHOLE = tl.constexpr(12582912.0)  # 3 · 2²²: x + WHOLE holds x rounded to a whole number, |x| < 2²², in its last bits
BITS = tl.constexpr(0x4B400000)  # of WHOLE
STEPS = tl.constexpr(32767.0)  # a direction's entries are whole numbers of 1/STEPS
NOT_FINITE = tl.constexpr(-32768)  # stands for an entry of a direction that is not


@triton.jit
def on_grid(x):
    """x in [-1, 1] in units of 1/STEPS, rounded: as a float32 and as a 16 bit integer.

    By additions, for the GPU converts and rounds at a quarter of their rate.
    """
    y = x * STEPS + WHOLE
    return y - WHOLE, tl.where(y == y, y.to(tl.int32, bitcast=True) - BITS, NOT_FINITE).to(tl.int16)


@triton.jit
def from_grid(x):
    """The whole number in float32, NaN for NOT_FINITE, of such an integer."""
    y = (x.to(tl.int32) + BITS).to(tl.float32, bitcast=True) - WHOLE
    return tl.where(x == NOT_FINITE, float("nan"), y)


@triton.jit
def bytes_of(x):
    """The two parts of whole numbers x = 256 y + z of 16 bits, both bfloat16 without rounding."""
    high = (x * 0.00390625 + WHOLE) - WHOLE
    return high, x - 256.0 * high


@triton.jit
def inverse_column_norm(x):
    """1/‖column‖, zero for zero columns, NaN for those that are not finite, [1, N]."""
    squared = tl.sum(x * x, 0)
    inverse = tl.where(squared > 0, 1 / tl.sqrt(tl.where(squared > 0, squared, 1.0)), 0.0)
    return tl.where(squared < float("inf"), inverse, float("nan"))[None, :]


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

    Directions are float64 times SCALE, or whole numbers (`on_grid`): rounding a unit vector to float32 would leave the
    span of its repetitions, of whole numbers sums are exact. There each is a pair of bfloat16 vectors of whole numbers
    up to 128, whose products, two a token at most, sum up exactly in float32 for GROUP * C = 512 tokens. So the sum is
    exactly that of the directions. EXACT: "bf16", or "ieee" in the interpreter, which does not model it.
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
                V *= SCALE
            else:
                U, kept = on_grid(U)
                high, low = bytes_of(U)
                if R < D:
                    V, kept = on_grid(V)
                    high_rows, low_rows = bytes_of(V)
                else:
                    high_rows, low_rows = high, low
                large = dot_onto(large, high_rows, tl.trans(high), EXACT)
                middle = dot_onto(middle, high_rows, tl.trans(low), EXACT)
                if R < D:  # else it is the transpose
                    middle = dot_onto(middle, low_rows, tl.trans(high), EXACT)
                small = dot_onto(small, low_rows, tl.trans(low), EXACT)
            tl.store(directions + at * D + some, V if WIDE else kept, mask=mask_now[None, :])
        if not WIDE:
            if R == D:
                middle += tl.trans(middle)
            total += large.to(tl.float64) * 65536.0 + middle.to(tl.float64) * 256.0 + small.to(tl.float64)
    tl.store(gram + program * D * D + row[:, None] * D + line[None, :],
             total * (SCALE * SCALE / (1.0 if WIDE else STEPS * STEPS)))


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
    """Unit directions [tokens, H, D], A at stretch starts [NS, H, D, D], M after the last token [N, H, D, D] float64.

    Directions are `on_grid` and A float32, or where wide directions times scale and A float64.

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
        C=32 if d < 128 else 64, GROUP=16 if d < 128 else 8, WIDE=wide, EXACT="ieee" if INTERPRETED else "bf16",
        num_warps=4 if d < 128 else 8)
    M_last = scan(matrices, table, 2, M0)
    inverses = matrices if wide else torch.empty_like(matrices, dtype=torch.float32)
    inverse_kernel[grid](matrices, inverses, D=d, AXIS=0 if d < 128 else 1, num_warps={16: 1, 32: 1, 64: 2, 128: 8}[d])
    return directions, inverses, M_last
