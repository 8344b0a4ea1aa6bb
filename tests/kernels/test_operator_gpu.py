"""The operator on CUDA against the float64 token loop on the CPU, and against itself on the CPU."""

import pytest
import torch
from kernel_cases import VARIANTS, assert_close, make_inputs, relative_errors, run

from kernels import vla, vla_step

pytestmark = pytest.mark.gpu


def _to(leaves, device="cuda", dtype=None):
    return {n: None if x is None else x.to(device, dtype or x.dtype) for n, x in leaves.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("readout", ["normalized", "headwise"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_equals_the_token_loop(variant, readout, packed):
    leaves, options = make_inputs(variant, readout, 1 if packed else 2, 150, 2, 32, 24, sequences=4 if packed else None,
                                  with_state=packed)
    cu = torch.tensor([0, 70, 71, 135, 150]) if packed else None
    truth = run(leaves, options, backend="reference", cu_seqlens=cu)
    found = run(_to(leaves), options, cu_seqlens=None if cu is None else cu.cuda())
    assert found["o"].is_cuda
    assert_close(found, truth, 1e-11)


@pytest.mark.parametrize("dtype,backend,bound,gradient_bound", [
    (torch.float32, "chunked", 2e-4, 2e-4), (torch.float32, "auto", 2e-4, 2e-4),
    (torch.bfloat16, "chunked", 5e-3, 0.1), (torch.bfloat16, "auto", 5e-2, 0.1)])  # auto: Triton, matmuls in bfloat16
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_single_and_half_precision(variant, packed, dtype, backend, bound, gradient_bound):
    # Values that bfloat16 holds, one truth for both; bounds as in test_precision.
    leaves, options = make_inputs(variant, "headwise", 1, 257, 2, 64, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 100, 257]) if packed else None
    truth = run(_to(leaves, "cpu", torch.float64), options, backend="reference", cu_seqlens=cu)
    found = run(_to(leaves, dtype=dtype), options, cu_seqlens=None if cu is None else cu.cuda(), backend=backend)
    errors = relative_errors(found, truth)
    print(variant, packed, dtype, backend, {name: f"{error:.0e}" for name, error in errors.items()})
    outputs = [name for name in truth if not name.startswith("d")]
    assert_close({n: found[n] for n in outputs}, {n: truth[n] for n in outputs}, bound)
    assert_close(found, truth, gradient_bound)


def test_autocast_and_repeated_runs_change_no_bit():
    leaves, options = make_inputs("unit", "headwise", 1, 200, 2, 64, 64, sequences=3, dtype=torch.float32)
    leaves, cu = _to(leaves), torch.tensor([0, 77, 78, 200], device="cuda")
    first = run(leaves, options, cu_seqlens=cu)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        second = run(leaves, options, cu_seqlens=cu)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rank", [1, 16, None])
@pytest.mark.parametrize("inside", [False, True])
def test_long_low_rank(rank, inside):
    d, T = 64, 65_536
    gen = torch.Generator().manual_seed(0)
    full = [torch.randn(1, T, 1, d, generator=gen) for _ in range(4)]
    low = full[3] if rank is None else full[3][:, torch.randint(rank, (T,), generator=gen)]
    q, k, v, u = (full[0], low, full[2], None) if inside else (*full[:3], low)
    options = dict(readout="headwise", output_final_state=True)
    with torch.no_grad():
        truth = vla(*(None if x is None else x.double() for x in (q, k, v, u)), **options)
        found = vla(*(None if x is None else x.cuda() for x in (q, k, v, u)), **options)
    assert_close({"S": found.final_state.S}, {"S": truth.final_state.S}, 1e-4)
    assert (found.o.cpu() - truth.o).square().mean().sqrt() < 1e-3 * truth.o.square().mean().sqrt()


def test_step_and_diagnostics():
    leaves, options = make_inputs("unit", "normalized", 2, 70, 2, 16, 16, dtype=torch.float32)
    x = _to({name: leaves[name] for name in ("q", "k", "v", "u", "beta")})
    penalty = leaves["penalty"].cuda()
    whole = vla(**x, penalty=penalty, diagnostics=True, **options)
    past = vla(**{n: y[:, :60] for n, y in x.items()}, penalty=penalty, output_final_state=True, **options)
    state = past.final_state
    for t in range(60, 70):
        out = vla_step(**{n: y[:, t] for n, y in x.items()}, state=state, penalty=penalty, **options)
        state = out.final_state
        assert_close({"o": out.o}, {"o": whole.o[:, t]}, 1e-4)
    expected = vla(**{n: y.cpu().double() for n, y in x.items()}, penalty=penalty.cpu().double(), diagnostics=True,
                   backend="reference", **options).diagnostics
    found = whole.diagnostics
    names = ("chunk_ends", "state_norm", "penalty_norm", "penalty_condition", "jacobian_norm", "residual_norm")
    assert_close({n: getattr(found, n) for n in names}, {n: getattr(expected, n) for n in names}, 1e-3)
