"""The Triton kernels over a million tokens on a GPU: memory, a state handed on, and directions on low-rank input."""

import pytest
import torch

from kernels import vla
from kernels.triton_backend import resolve
from kernels.triton_common import tables
from kernels.triton_write_direction import map_forward, stretch_tokens

pytestmark = pytest.mark.gpu
MILLION = 2**20
PENALTY = 0.1
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


def map_of_the_last_64(precision, own, tokens):
    """The map's result (direction, length) of the last 64 tokens, and a = A_t k̂_t in float64. Directions are of low
    rank but for the last 64 of u = k̂; of the last 64 keys 32 are random and 32 within the span."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads, d = len(RANKS), 64

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    u = torch.stack([draw(rank, d)[torch.randint(rank, (tokens,), generator=generator, device="cuda")]
                     for rank in RANKS], 1)
    k = draw(tokens, heads, d)
    k[-32:] = u[-32:]
    if own:
        k[:-64], u = u[:-64], k
    table = tables(1, tokens, None, stretch_tokens(tokens, heads, d), k.device)
    M = PENALTY * torch.eye(d, dtype=torch.float64, device="cuda").repeat(heads, 1, 1)
    found, _ = map_forward(k, None if own else u, M[None], table, feature_map="identity", scale=1.0, raw=False,
                           unit=True, precision=resolve(precision, False, k, k))
    unit_k, unit_u = (x.double() / x.double().norm(dim=-1, keepdim=True) for x in (k[-64:], u))
    M = M + torch.einsum("thi,thj->hij", unit_u[:-64], unit_u[:-64])
    M = M + torch.einsum("thi,thj->thij", unit_u[-64:], unit_u[-64:]).cumsum(0)
    return found.w[-64:].double(), found.norms[-64:].double(), torch.linalg.solve(M, unit_k[..., None])[..., 0]


def worst(error):
    """Largest over the 32 tokens outside the span and the 32 inside, [2, ranks]."""
    return error.norm(dim=-1).view(2, 32, -1).amax(1)


@pytest.mark.parametrize("tokens", [4096, 65_536, MILLION])
@pytest.mark.parametrize("own", [False, True])
def test_directions_on_low_rank_input(own, tokens):
    """α̂ in the float32 path, where A, its factors and what they are applied to are float64."""
    w, _, a = map_of_the_last_64("tf32x3", own, tokens)
    outside, inside = worst(w - a / a.norm(dim=-1, keepdim=True))
    print(f"own={own} {tokens}: outside", *(f"{x:.0e}" for x in outside), "inside", *(f"{x:.0e}" for x in inside))
    assert (outside < 1e-3).all() and (inside < 1e-2).all()


@pytest.mark.parametrize("tokens", [4096, 65_536, MILLION])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_map_on_low_rank_input_with_a_float32_A(precision, tokens):
    """Inside the span ‖a‖ falls like 1/T to below the rounding of A's largest entries 1/λ0, so no direction is left
    there; a itself is right in units of 1/λ0, and so is the direction of what is not in the span."""
    w, norms, a = map_of_the_last_64(precision, False, tokens)
    direction = worst(w - a / a.norm(dim=-1, keepdim=True))[0]
    whole = worst(w * norms[..., None] - a).amax(0) * PENALTY
    print(f"{precision} {tokens}: direction outside", *(f"{x:.0e}" for x in direction),
          "a", *(f"{x:.0e}" for x in whole))
    assert (direction < 3e-2).all() and (whole < 5e-3).all()
