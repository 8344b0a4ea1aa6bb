"""What the Triton kernels share: which calls they take, a call's chunk tables, matmul precision, features, unit rows.

Every call, dense or packed, is seen as sequences on one line of tokens: [B, T, H, D] is read as [B*T, H, D] and a table
says where each sequence, each stretch and each chunk begins and ends. Kernels walk these tables, so that lengths
are never part of a compiled kernel.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64  # tokens a chunk of the memory; a multiple of the 16-row leaf
LEAF = 16  # tokens between two updates of A
HEAD_SIZES = (16, 32, 64, 128)
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run in Python on the CPU


def unsupported(call) -> str | None:
    """Why these kernels do not take a call, as the end of a sentence; None where they do."""
    dk, dv = call.q.shape[-1], call.v.shape[-1]
    if dk not in HEAD_SIZES or dv not in HEAD_SIZES:
        return f"head sizes {', '.join(map(str, HEAD_SIZES))} only, not {dk} (keys) and {dv} (values)"
    if call.q.dtype == torch.float64:
        return "bfloat16, float16 and float32 only, not float64"
    if call.q.device.type != "cuda" and not INTERPRETED:
        return f"CUDA tensors only, not {call.q.device.type} ones (or TRITON_INTERPRET=1 from the start, for tests)"
    return None


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Kernels launch on the current device, which need not be that of x: a new thread begins on the first."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@dataclass(frozen=True)
class Precision:
    """How a call computes. Sums are always float32 or wider: this is about matmul inputs and what is kept.

    memory: matmul inputs of the delta rule, "bf16", "tf32", "tf32x3" or "ieee".  solve: of its triangular inverse.
    direction: where A is carried along, "bf16x3" or "ieee".  reading: where it is only applied.
    wide: A, Gram sums and the products with A in float64.
    store: dtype of intermediates that later kernels read.
    """

    memory: str
    solve: str
    direction: str
    reading: str
    wide: bool
    store: torch.dtype


@dataclass(frozen=True)
class Tables:
    """Places on the line of tokens, int32, on the device. stretch: a run of chunks that starts from its own inverse.

    chunks [NC, 3]: first token, end (exclusive), sequence.  stretches [NS, 3]: first token, end, first chunk.
    sequences [N, 6]: first chunk, end chunk, first stretch, end stretch, first token, end token.
    """

    chunks: Tensor
    stretches: Tensor
    sequences: Tensor


@lru_cache(maxsize=32)
def tables(rows: int, tokens: int, bounds: tuple[int, ...] | None, stretch: int, device: torch.device) -> Tables:
    """The tables of a call: bounds = cu_seqlens as numbers, None for dense; stretch = tokens, a multiple of CHUNK."""
    edges = torch.arange(rows + 1, dtype=torch.int64) * tokens if bounds is None else torch.tensor(bounds)
    start, end = edges[:-1], edges[1:]

    def cut(size: int):
        counts = (end - start + size - 1) // size
        after = counts.cumsum(0)
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        first = start[owner] + (torch.arange(len(owner)) - (after - counts)[owner]) * size
        return torch.stack([first, torch.minimum(first + size, end[owner]), owner], 1), after - counts, after

    chunks, chunk_first, chunk_end = cut(CHUNK)
    stretches, stretch_first, stretch_end = cut(stretch)
    owner = stretches[:, 2]
    stretches[:, 2] = chunk_first[owner] + (stretches[:, 0] - start[owner]) // CHUNK
    sequences = torch.stack([chunk_first, chunk_end, stretch_first, stretch_end, start, end], 1)
    # A blocking copy would wait for all that the GPU has still to do.
    on_device = (x.int().contiguous().to(device, non_blocking=True) for x in (chunks, stretches, sequences))
    return Tables(*on_device)


@triton.jit
def leading_bits(x):
    """x cut to the 11 significant bits that a tf32 matmul keeps."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def leading_byte(x):
    """x cut to the 8 significant bits of a bfloat16."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pieces(x):
    """Three bfloat16 tensors that add up to the float32 tensor x. By cutting, for rounding is slow on the GPU."""
    first = leading_byte(x)
    rest = x - first
    second = leading_byte(rest)
    return first.to(tl.bfloat16), second.to(tl.bfloat16), (rest - second).to(tl.bfloat16)


@triton.jit
def dot_onto(total, a, b, P: tl.constexpr, SHORT: tl.constexpr = 0):
    """total + a @ b, summed in float32, with inputs as precise as P says; bf16x3, three bfloat16 parts a factor, is
    float32 but for its last bits. Matrices or batches of them. SHORT: which factor (1, 2) has 16 significant bits only,
    0 for none."""
    if P == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        a, b = a.to(tl.float32), b.to(tl.float32)
        if P == "bf16x3":
            a1, a2, a3 = pieces(a)
            b1, b2, b3 = pieces(b)
            if SHORT != 1:
                total = tl.dot(a3, b1, total)
            if SHORT != 2:
                total = tl.dot(a1, b3, total)
            total = tl.dot(a2, b2, total)
            total = tl.dot(a2, b1, total)
            total = tl.dot(a1, b2, total)
            return tl.dot(a1, b1, total)
        elif P == "tf32x3":
            # Triton's own tf32x3 tests every partial sum for NaN, which costs more than the matmuls of small tiles.
            a_lead, b_lead = leading_bits(a), leading_bits(b)
            total = tl.dot(a - a_lead, b_lead, total, input_precision="tf32")
            total = tl.dot(a_lead, b - b_lead, total, input_precision="tf32")
            return tl.dot(a_lead, b_lead, total, input_precision="tf32")
        else:
            return tl.dot(a, b, total, input_precision=P)


@triton.jit
def dot(a, b, P: tl.constexpr, SHORT: tl.constexpr = 0):
    """a @ b, likewise."""
    if len(a.shape) == 3:
        return dot_onto(tl.zeros([a.shape[0], a.shape[1], b.shape[2]], tl.float32), a, b, P, SHORT)
    else:
        return dot_onto(tl.zeros([a.shape[0], b.shape[1]], tl.float32), a, b, P, SHORT)


@triton.jit
def dot_apart(a, b, P: tl.constexpr, SHORT: tl.constexpr = 0):
    """a @ b; the parts of the sum side by side, not one after the other, for small tiles that wait on latency."""
    if P == "bf16x3":
        a1, a2, a3 = pieces(a)
        b1, b2, b3 = pieces(b)
        rest = tl.dot(a2, b1, tl.dot(a2, b2))
        other = tl.dot(a1, b2)
        if SHORT != 1:
            rest = tl.dot(a3, b1, rest)
        if SHORT != 2:
            other = tl.dot(a1, b3, other)
        return tl.dot(a1, b1) + (rest + other)
    elif P == "tf32x3":
        a_lead, b_lead = leading_bits(a), leading_bits(b)
        rest = tl.dot(a - a_lead, b_lead, input_precision="tf32") + tl.dot(a_lead, b - b_lead, input_precision="tf32")
        return rest + tl.dot(a_lead, b_lead, input_precision="tf32")
    else:
        return dot(a, b, P)


@triton.jit
def dot_wide(a, b):
    """a @ b of float64, summed in float64."""
    return tl.dot(a, b, out_dtype=tl.float64)


@triton.jit
def places(token, end, head, H, D: tl.constexpr, C: tl.constexpr):
    """Where the rows from `token` on lie in a [tokens, H, D] tensor: the first one's offset (64 bit), all [C, D] from
    there (32 bit: half the registers), and which rows exist, [C, 1]."""
    row = tl.arange(0, C)
    offsets = (row * (H * D))[:, None] + tl.arange(0, D)[None, :]
    return (token.to(tl.int64) * H + head) * D, offsets, (row < end - token)[:, None]


@triton.jit
def token_places(token, end, head, H, C: tl.constexpr):
    """Likewise in a [tokens, H] tensor: first offset, the others' [C] and which exist."""
    row = tl.arange(0, C)
    return token.to(tl.int64) * H + head, row * H, row < end - token


@triton.jit
def load(pointer, offsets, mask):
    """Load as float32, zero outside."""
    return tl.load(pointer + offsets, mask=mask, other=0).to(tl.float32)


@triton.jit
def feature(x, mask, F: tl.constexpr):
    """φ(x), zero in rows that do not exist."""
    if F == "elu1":
        y = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    elif F == "silu":
        y = x * tl.sigmoid(x)
    else:
        y = x
    return tl.where(mask, y, 0.0)


@triton.jit
def feature_slope(x, F: tl.constexpr):
    """φ'(x)."""
    if F == "elu1":
        return tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif F == "silu":
        s = tl.sigmoid(x)
        return s * (1 + x * (1 - s))
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def inverse_norm(x):
    """1/‖row‖, zero for zero rows, [C]."""
    square = tl.sum(x * x, 1)
    return tl.where(square > 0, 1 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)


@triton.jit
def unit_rows(x):
    return x * inverse_norm(x)[:, None]


@triton.jit
def unit_rows_gradient(x, dy):
    """Gradient of unit_rows at x for the gradient dy of its result."""
    scale = inverse_norm(x)
    y = x * scale[:, None]
    return (dy - y * tl.sum(y * dy, 1)[:, None]) * scale[:, None]


@triton.jit
def scan_kernel(x, initial, total, sequences, H, SIZE, COLUMN: tl.constexpr, REVERSE: tl.constexpr,
                HAS_INITIAL: tl.constexpr, DIAGONAL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Exclusive sums along each sequence, in place, on top of `initial`; the sums with the last one to `total`.

    DIAGONAL: D where `initial` holds a multiple of the D x D identity for each head, else 0.

    GROUP addends are loaded at once: one at a time, the pass would wait for memory at every step.
    """
    blocks = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    place = (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    line = program // blocks  # sequence * H + head
    sequence, head = line // H, line % H
    first = tl.load(sequences + sequence * 6 + COLUMN)
    end = tl.load(sequences + sequence * 6 + COLUMN + 1)
    inside = place < SIZE
    carry = tl.zeros([BLOCK], x.dtype.element_ty)
    if DIAGONAL > 0:
        carry += tl.where(place // DIAGONAL == place % DIAGONAL, tl.load(initial + head), 0.0).to(carry.dtype)
    elif HAS_INITIAL:
        carry += tl.load(initial + line * SIZE + place, mask=inside, other=0).to(carry.dtype)
    for i in range(0, (end - first + GROUP - 1) // GROUP):
        step = i * GROUP + tl.arange(0, GROUP)
        at = end - 1 - step if REVERSE else first + step
        pointer = x + ((at.to(tl.int64) * H + head) * SIZE)[:, None] + place[None, :]
        mask = (step < end - first)[:, None] & inside[None, :]
        value = tl.load(pointer, mask=mask, other=0)
        tl.store(pointer, carry[None, :] + (tl.cumsum(value, 0) - value), mask=mask)
        carry += tl.sum(value, 0)
    tl.store(total + line * SIZE + place, carry, mask=inside)


def scan(x: Tensor, table: Tables, column: int, initial: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Turn x [NC or NS, H, ...] into its exclusive sums along each sequence, in place; returns the totals [N, H, ...].

    column: 0 for a tensor by chunks, 2 by stretches. reverse: sums of what comes later. initial:
    [N, H, ...], or [H] for multiples of the identity under x [..., D, D].
    """
    total = x.new_empty(len(table.sequences), *x.shape[1:])
    heads, size = x.shape[1], x[0, 0].numel()
    block = min(256, triton.next_power_of_2(size))
    grid = (len(table.sequences) * heads * triton.cdiv(size, block),)
    diagonal = x.shape[-1] if initial is not None and initial.dim() == 1 else 0
    scan_kernel[grid](x, initial, total, table.sequences, heads, size, COLUMN=column, REVERSE=reverse,
                      HAS_INITIAL=initial is not None, DIAGONAL=diagonal, GROUP=8, BLOCK=block, num_warps=4)
    return total
