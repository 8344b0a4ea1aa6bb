"""The Triton kernels over a million tokens on a GPU: memory, a state handed on, and directions on low-rank input."""

import pytest
import torch

from kernels import vla
from kernels.triton_backend import resolve
from kernels.triton_common import tables
from kernels.triton_write_direction import map_forward, stretch_tokens

pytestmark = pytest.mark.gpu
MILLION = 2**20
RANKS = (1, 4, 16, 48, 64)  # of the directions, a head each


@pytest.mark.parametrize("own", [False, True])  # u given, or the unit key
def test_a_million_tokens_forward_and_backward_in_bounded_memory(own):
    torch.manual_seed(0)
    inputs = [torch.randn(1, MILLION, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for _ in range(3 if own else 4)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = vla(*inputs, readout="headwise", backend="triton").o
    gradients = torch.autograd.grad(o, inputs, torch.randn_like(o))
    per_token = (torch.cuda.max_memory_allocated() - before) / (4 * MILLION)  # and head
    assert per_token < 5120, f"{per_token:.0f} bytes"
    assert all(bool(x.isfinite().all()) for x in (o, *gradients))
    with torch.no_grad():  # the same in two calls
        halves = [x.chunk(2, 1) for x in inputs]
        first = vla(*(x[0] for x in halves), readout="headwise", output_final_state=True, backend="triton")
        second = vla(*(x[1] for x in halves), readout="headwise", initial_state=first.final_state, backend="triton").o
    for half, whole in zip((first.o, second), o.chunk(2, 1)):
        for x, y in zip(half.float().split(MILLION // 8, 1), whole.float().split(MILLION // 8, 1)):
            assert (x - y).norm() < 2e-2 * y.norm()


@pytest.mark.parametrize("tokens", [4096, 65_536, MILLION])
@pytest.mark.parametrize("precision,own,outside_bound,inside_bound",
                         [("tf32x3", False, 1e-3, 1e-2), ("tf32x3", True, 1e-3, 1e-2), ("bf16", False, 2e-2, 2e-2)])
def test_directions_on_low_rank_input(precision, own, outside_bound, inside_bound, tokens):
    """α̂ of the last 64 tokens against float64, in the float32 path and, for u = W_u k, in bfloat16's."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads, d = len(RANKS), 64

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    u = torch.stack([draw(rank, d)[torch.randint(rank, (tokens,), generator=generator, device="cuda")]
                     for rank in RANKS], 1)
    k = draw(tokens, heads, d)
    k[-32:] = u[-32:]  # inside the span of u
    if own:
        k[:-64], u = u[:-64], k
    table = tables(1, tokens, None, stretch_tokens(tokens, heads, d), k.device)
    M = 0.1 * torch.eye(d, dtype=torch.float64, device="cuda").repeat(heads, 1, 1)
    found, _ = map_forward(k, None if own else u, M[None], table, feature_map="identity", scale=1.0, raw=False, unit=True,
                        precision=resolve(precision, k, k))
    unit_k, unit_u = (x.double() / x.double().norm(dim=-1, keepdim=True) for x in (k[-64:], u))
    M = M + torch.einsum("thi,thj->hij", unit_u[:-64], unit_u[:-64])
    M = M + torch.einsum("thi,thj->thij", unit_u[-64:], unit_u[-64:]).cumsum(0)
    a = torch.linalg.solve(M, unit_k[..., None])[..., 0]
    error = (found.w[-64:].double() - a / a.norm(dim=-1, keepdim=True)).norm(dim=-1)
    outside, inside = ([f"{x:.0e}" for x in part.amax(0).tolist()] for part in error.split(32))
    print(f"{precision} own={own} {tokens}: outside", *outside, "inside", *inside)
    assert (error[:32] < outside_bound).all(), outside
    assert (error[32:] < inside_bound).all(), inside
