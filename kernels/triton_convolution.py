"""The short convolution before the operator, with its SiLU: one launch forward, two backward, documents packed or not.

PyTorch's takes twice the operator's time, 2.9 ms forward and backward of [16384, 2304] in bfloat16 on an H200: it wants
channels first and documents moved apart. These kernels read tokens where they lie and mask what a document did not see.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.faulty_kinds import FAULTY
from kernels.triton_common import INTERPRETED, on_device_of
from kernels.triton_verdict import found_right

BLOCK_TOKENS, BLOCK_CHANNELS = 32, 128
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of `check_error`
_checked: set[tuple] = set()


@torch.compiler.assume_constant_result
def takes(dtype: torch.dtype, width: int, channels: int, packed: bool, tailed: bool, device: torch.device) -> bool:
    """Whether `convolve` computes such an x, found right in a small call before the first of its kind.

    A kind is what is compiled apart: with documents or without, with inputs before them or without, channels a multiple
    of 16 or not.
    """
    if dtype not in BOUNDS or (device.type != "cuda" and not INTERPRETED):
        return False
    kind = ("convolution", dtype, width, channels % 16 == 0, packed, tailed)
    if (*kind, device) not in _checked and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        what = f"convolution{', packed' * packed}{', tail' * tailed}, {dtype}, width {width}, {channels} channels"
        if not found_right(check_error, *kind[1:], device, bound=BOUNDS[dtype], device=device, what=what,
                           instead="PyTorch's is used"):
            FAULTY.add(kind)
        _checked.add((*kind, device))
    return kind not in FAULTY


def check_error(dtype: torch.dtype, width: int, aligned: bool, packed: bool, tailed: bool,
                device: torch.device) -> float:
    """Largest relative error of y and the gradients, of a few documents. Draws from no generator but its own."""
    edges = (0, 1, 3, 37, 80) if packed else (0, 40, 80)
    channels, documents, generator = 144 if aligned else 135, len(edges) - 1, torch.Generator(device).manual_seed(0)
    shapes = ((80, channels), (channels, width), (documents, width - 1, channels))
    x, weight, tail = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    leaves = [x.to(dtype).requires_grad_(), weight.requires_grad_(), tail.to(dtype).mul(tailed).requires_grad_()]
    dy = torch.randn(x.shape, generator=generator, device=device, dtype=torch.float64)
    bounds, document = torch.tensor(edges, device=device), torch.zeros(80, dtype=torch.int64, device=device)
    document[list(edges[1:-1])] = 1
    where = (bounds, document.cumsum(0), 80) if packed else (None, None, 40)
    truth = [x.detach().double().requires_grad_() for x in leaves]
    lines = [torch.cat((past, truth[0][a:b])) for past, a, b in zip(truth[2], edges, edges[1:])]
    windows = torch.cat([line.unfold(0, width, 1) for line in lines]).flip(-1)  # lag 0 first
    y, expected = convolve(*leaves[:2], leaves[2] if tailed else None, *where), F.silu((windows * truth[1]).sum(-1))
    wanted = slice(3 if tailed and width > 1 else 2)
    pairs = [(y, expected), *zip(torch.autograd.grad((y.double() * dy).sum(), leaves[wanted]),
                                 torch.autograd.grad((expected * dy).sum(), truth[wanted]))]
    errors = torch.stack([(a.detach().double() - b.detach()).norm() / b.detach().norm() for a, b in pairs])
    return float(errors.max())  # NaN where one is


def convolve(x: Tensor, weight: Tensor, tail: Tensor | None, bounds: Tensor | None, document: Tensor | None,
             length: int) -> Tensor:
    """y_t = SiLU(Σ_j w_j x_{t-j}), j < W, within the document of t, [T, C] in the dtype of x, summed in float32.

    Args:
        x: [T, C], documents end to end.
        weight: [C, W].
        tail: [N, W - 1, C], inputs before each document's first; None: zeros.
        bounds, document: int64 [N + 1] and [T], where documents begin and which is a token's; None: all of `length`.
    """
    return convolve_op(x.contiguous(), weight.contiguous(), tail, bounds, document, length)


@triton.jit
def place(t, inside, bounds, document, length):
    """A token's document, and its place there."""
    if document is None:
        owner, position = t // length, t % length
    else:
        owner = tl.load(document + t, mask=inside, other=0)
        position = t - tl.load(bounds + owner, mask=inside, other=0)
    return owner, position


@triton.jit
def before(x, tail, t, channel, inside, owner, position, C, LAG: tl.constexpr, W: tl.constexpr):
    """The inputs LAG tokens before those at t, float32 [tokens, channels]."""
    here = inside & (position >= LAG)[:, None]
    found = tl.load(x + (t - LAG)[:, None] * C + channel[None, :], mask=here, other=0).to(tl.float32)
    if tail is not None:
        if LAG > 0:
            row = owner * (W - 1) + (W - 1) + position - LAG
            old = inside & (position < LAG)[:, None]
            found += tl.load(tail + row[:, None] * C + channel[None, :], mask=old, other=0).to(tl.float32)
    return found


@triton.jit
def weighted(x, weight, tail, t, channel, inside, owner, position, C, W: tl.constexpr, BT: tl.constexpr,
             BC: tl.constexpr):
    """The sum before the SiLU."""
    total = tl.zeros([BT, BC], tl.float32)
    for lag in tl.static_range(W):
        w = tl.load(weight + channel * W + lag, mask=channel < C, other=0).to(tl.float32)
        total += w[None, :] * before(x, tail, t, channel, inside, owner, position, C, lag, W)
    return total


@triton.jit
def convolve_kernel(x, weight, tail, bounds, document, y, length, T, C, W: tl.constexpr, BT: tl.constexpr,
                    BC: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (t < T)[:, None] & (channel < C)[None, :]
    owner, position = place(t, t < T, bounds, document, length)
    total = weighted(x, weight, tail, t, channel, inside, owner, position, C, W, BT, BC)
    tl.store(y + t[:, None] * C + channel[None, :], total * tl.sigmoid(total), mask=inside)


@triton.jit
def before_silu_kernel(dy, x, weight, tail, bounds, document, ds, dweight, length, T, C, W: tl.constexpr,
                       BT: tl.constexpr, BC: tl.constexpr):
    """The gradient before the SiLU, and these tokens' part of the weight's, [blocks of tokens, W, C]."""
    block = tl.program_id(0).to(tl.int64)
    t = block * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (t < T)[:, None] & (channel < C)[None, :]
    owner, position = place(t, t < T, bounds, document, length)
    total = weighted(x, weight, tail, t, channel, inside, owner, position, C, W, BT, BC)
    gate = tl.sigmoid(total)
    d = tl.load(dy + t[:, None] * C + channel[None, :], mask=inside, other=0).to(tl.float32)
    d *= gate * (1 + total * (1 - gate))
    tl.store(ds + t[:, None] * C + channel[None, :], d, mask=inside)
    for lag in tl.static_range(W):
        part = tl.sum(d * before(x, tail, t, channel, inside, owner, position, C, lag, W), 0)
        tl.store(dweight + (block * W + lag) * C + channel, part, mask=channel < C)


@triton.jit
def input_gradient_kernel(ds, weight, bounds, document, dx, length, T, C, W: tl.constexpr, BT: tl.constexpr,
                          BC: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (t < T)[:, None] & (channel < C)[None, :]
    total = tl.zeros([BT, BC], tl.float32)
    for lag in tl.static_range(W):
        later = t + lag
        _, position = place(later, later < T, bounds, document, length)
        reached = inside & ((later < T) & (position >= lag))[:, None]  # of the same document
        w = tl.load(weight + channel * W + lag, mask=channel < C, other=0).to(tl.float32)
        d = tl.load(ds + later[:, None] * C + channel[None, :], mask=reached, other=0).to(tl.float32)
        total += w[None, :] * d
    tl.store(dx + t[:, None] * C + channel[None, :], total, mask=inside)


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], BLOCK_TOKENS), triton.cdiv(x.shape[1], BLOCK_CHANNELS)


def _sizes(x: Tensor, weight: Tensor) -> dict[str, int]:
    return dict(T=x.shape[0], C=x.shape[1], W=weight.shape[1], BT=BLOCK_TOKENS, BC=BLOCK_CHANNELS, num_warps=4)


@torch.library.custom_op("vla_kernels::convolve", mutates_args=())
def convolve_op(x: Tensor, weight: Tensor, tail: Tensor | None, bounds: Tensor | None, document: Tensor | None,
                length: int) -> Tensor:
    y = torch.empty_like(x)
    if x.numel():
        tail = None if tail is None else tail.contiguous()
        with on_device_of(x):
            convolve_kernel[_grid(x)](x, weight, tail, bounds, document, y, length, **_sizes(x, weight))
    return y


@convolve_op.register_fake
def _(x, weight, tail, bounds, document, length):
    return torch.empty_like(x)


@torch.library.custom_op("vla_kernels::convolve_backward", mutates_args=())
def convolve_backward_op(dy: Tensor, x: Tensor, weight: Tensor, tail: Tensor | None, bounds: Tensor | None,
                         document: Tensor | None, length: int) -> list[Tensor]:
    """dx, dweight, and the gradient before the SiLU."""
    grid, sizes = _grid(x), _sizes(x, weight)
    dx, ds = torch.empty_like(x), torch.empty_like(x)
    dweight = torch.empty(grid[0], weight.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    if x.numel():
        tail = None if tail is None else tail.contiguous()
        with on_device_of(x):
            before_silu_kernel[grid](dy.contiguous(), x, weight, tail, bounds, document, ds, dweight, length, **sizes)
            input_gradient_kernel[grid](ds, weight, bounds, document, dx, length, **sizes)
    return [dx, dweight.sum(0).mT.to(weight.dtype, memory_format=torch.contiguous_format), ds]


@convolve_backward_op.register_fake
def _(dy, x, weight, tail, bounds, document, length):
    return [torch.empty_like(x), torch.empty_like(weight), torch.empty_like(x)]


def _setup(ctx, inputs, output):
    *tensors, ctx.length = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):
    x, weight, tail, bounds, document = ctx.saved_tensors
    dx, dweight, ds = convolve_backward_op(dy, x, weight, tail, bounds, document, ctx.length)
    dtail = None
    if tail is not None and ctx.needs_input_grad[2]:
        dtail = _tail_gradient(ds, weight, tail, bounds, ctx.length)
    return dx, dweight, dtail, None, None, None


def _tail_gradient(ds: Tensor, weight: Tensor, tail: Tensor, bounds: Tensor | None, length: int) -> Tensor:
    documents, width = tail.shape[0], weight.shape[1]
    if not ds.shape[0]:
        return torch.zeros_like(tail)
    if bounds is None:
        bounds = torch.arange(documents + 1, device=ds.device) * length
    dtail = torch.zeros_like(tail, dtype=torch.float32)
    for position in range(width - 1):
        t = bounds[:-1] + position
        d = ds.index_select(0, t.clamp(max=ds.shape[0] - 1)).float().masked_fill((t >= bounds[1:])[:, None], 0)
        for lag in range(position + 1, width):
            dtail[:, width - 1 + position - lag] += weight[:, lag].float() * d
    return dtail.to(tail.dtype)


convolve_op.register_autograd(_backward, setup_context=_setup)
