"""The Triton kernels: in Triton's interpreter on any machine, and on a GPU (marker `gpu`) for what only a GPU shows."""

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from kernel_cases import VARIANTS, make_inputs
from torch.utils.checkpoint import checkpoint
from triton_cases import CPU_CASES, DIAGNOSED, TF32_CASES, diagnostics_errors, errors, extremes

from kernels import triton_check, vla
from tests.interpreter import found_by

HERE = Path(__file__).parent
# Falling back would compare PyTorch with itself.
pytestmark = pytest.mark.filterwarnings("error:the Triton kernels failed")

# name: (variant, readout, (B, T, H, Dk, Dv), with_state, cu_seqlens)
GPU_CASES = {f"{variant}, {readout}": (variant, readout, (2, 203, 3, 64, 64), False, None)
             for variant in VARIANTS for readout in ("normalized", "headwise")}
GPU_CASES |= {
    f"sizes {dk} and {dv}": ("unit", "headwise", (2, 130, 2, dk, dv), True, None)
    for dk, dv in ((16, 16), (16, 64), (32, 32), (32, 128), (64, 16), (64, 128), (128, 32), (128, 128))}
GPU_CASES |= {
    "packed": ("unit", "headwise", (1, 1400, 2, 64, 64), True, (0, 1, 65, 200, 263, 1300, 1400)),
    "packed, normalized": ("gain-key", "normalized", (1, 1400, 2, 64, 64), True, (0, 1, 65, 200, 263, 1300, 1400)),
    "many stretches": ("unit", "headwise", (1, 2500, 1, 64, 64), False, None),
}
# Float32 through float32-like matmuls, float16 through tf32, bfloat16: the largest error of any result or gradient.
BOUNDS = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# dλ0 = −Σ b_t·a_t: with the large λ0 that raw keys need, A is nearly I/λ0 and a unit write hardly turns with λ0. A sum
# of 18 in lengths, Σ ‖b_t‖ ‖a_t‖, cancels to 0.003, and bfloat16's rounding of w and dw leaves 18 · 2⁻⁹ / √406 = 0.002.
# The gain's λ0 is ten times the others', and its sum cancels too: 3,200 in lengths a head to 1.7, of which the same
# rounding leaves 3200 · 2⁻⁹ / √406 = 0.3.
CANCELLED = {name: {"dpenalty": 0.3} for name in ("unit-raw, headwise", "unit-raw, normalized", "gain, normalized")}


@pytest.fixture(scope="module")
def interpreted():
    """Errors of all CPU cases, from a process that had TRITON_INTERPRET=1 before Triton was imported."""
    return found_by(HERE / "triton_cases.py")


@pytest.mark.parametrize("name", CPU_CASES)
def test_equals_the_chunked_path_in_the_interpreter(interpreted, name):
    assert {key: error for key, error in interpreted[name].items() if not error < 1e-4} == {}


@pytest.mark.parametrize("name", TF32_CASES)
def test_equals_the_chunked_path_with_tf32_allowed_in_the_interpreter(interpreted, name):
    found, cancelled = interpreted[name + ", tf32"], {"gain": {"dpenalty": 1e-2}}.get(name, {})
    # directions are 16 bit integers
    assert {key: error for key, error in found.items() if not error < cancelled.get(key, 1e-3)} == {}


# What is left of float32: du is a difference of terms of 1/λ0, and a reset's e^-50 costs the sums their last digits.
EXTREMES = {"du, λ0 = 1e-4": 2e-3, "one direction": 3e-4, "reset by -inf": 1e-3, "beta 0": 1e-9}


def test_extremes_in_the_interpreter(interpreted):
    found = interpreted["extremes"]
    assert {name: error for name, error in found.items() if not error < EXTREMES.get(name, 2e-5)} == {}
    assert interpreted["nan"]["finite"] == 0  # of all that follows a direction that is NaN


@pytest.mark.gpu
def test_extremes():
    assert {name: error for name, error in extremes("cuda").items() if not error < EXTREMES.get(name, 2e-5)} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_a_direction_that_is_nan_is_seen(precision):
    x = [torch.randn(1, 300, 2, 64, device="cuda") for _ in range(4)]
    x[3][0, 100, 0, 5] = math.nan
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        o = vla(*x, readout="headwise", backend="triton").o[0, 100:]
    finally:
        torch.set_float32_matmul_precision(before)
    assert not o[:, 0].isfinite().any() and o[:, 1].isfinite().all()


def test_bfloat16_in_the_interpreter(interpreted):
    """Which multiplies bfloat16 wrongly: kernels compute in float32 there. The bound: what rounding w and o leaves."""
    assert {key: error for key, error in interpreted["bfloat16"].items() if not error < 3e-2} == {}


@pytest.mark.parametrize("variant", [variant for variant, _ in DIAGNOSED])
def test_diagnostics_equal_those_of_the_chunked_path_in_the_interpreter(interpreted, variant):
    found = interpreted[f"diagnostics of {variant}"]
    assert {key: error for key, error in found.items() if not error < 1e-4} == {}


def test_compiled_checkpointed_data_parallel_and_self_checked_in_the_interpreter(interpreted):
    same = {"o": 0, "gradients": 0, "o without gradient": 0}  # to the bit
    assert interpreted["compiled"] == same  # fullgraph=True
    assert interpreted["checkpointed"] == same
    assert interpreted["data parallel"]["gradients"] < 1e-6
    assert interpreted["self-check"]["error"] < 1e-4


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels take CPU tensors")
def test_what_the_kernels_do_not_take_is_said():
    q = torch.randn(1, 3, 1, 16)
    with pytest.raises(ValueError, match="CUDA tensors only, not cpu ones.*backend='chunked'"):
        vla(q, q, q, backend="triton")
    with pytest.raises(ValueError, match="head sizes 16, 32, 64, 128 only, not 16 .keys. and 24 .values."):
        vla(q, q, torch.randn(1, 3, 1, 24), backend="triton")
    with pytest.raises(ValueError, match="not float64"):
        vla(q.double(), q.double(), q.double(), backend="triton")


def test_without_triton_the_rest_works():
    code = """
import sys
sys.modules["triton"] = None
import torch
from kernels import vla
q = torch.randn(1, 3, 1, 16)
vla(q, q, q)
try:
    vla(q, q, q, backend="triton")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], capture_output=True, text=True)
    assert "needs the package triton, which is not installed" in done.stdout, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", GPU_CASES)
def test_equals_the_chunked_path(name, dtype):
    found = errors(name, GPU_CASES, dtype, "cuda")
    bounds = {} if dtype == torch.float32 else CANCELLED.get(name, {})
    print(name, dtype, "largest", max(found, key=found.get), f"{max(found.values()):.1e}", "o", f"{found['o']:.1e}")
    assert {key: error for key, error in found.items() if not error < bounds.get(key, BOUNDS[dtype])} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_passes_the_check_before_its_use(variant, dtype):
    leaves, options = make_inputs(variant, "headwise", 1, 70, 3, 64, 64)
    tensors = {key: None if leaves[key] is None else leaves[key].to("cuda", dtype).requires_grad_()
               for key in ("q", "k", "v", "u", "beta", "g")}
    options["penalty"] = leaves["penalty"].cuda()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the Triton kernels failed")
        # In a checkpoint, whose recomputation must save as many tensors as the first run, with the check in it.
        o = checkpoint(lambda: vla(**tensors, backend="triton", **options).o, use_reentrant=False)
        o.float().sum().backward()
    assert torch.equal(o, vla(**tensors, backend="triton", **options).o)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_diagnostics_equal_those_of_the_chunked_path(variant, packed):
    found = diagnostics_errors(variant, packed, torch.float32, "cuda")
    assert {key: error for key, error in found.items() if not error < 1e-3} == {}


@pytest.mark.gpu
def test_what_fails_the_check_is_left_to_pytorch(monkeypatch):
    q = torch.randn(1, 30, 2, 16, device="cuda")
    monkeypatch.setattr(triton_check, "check_error", lambda *_: 1.0)
    monkeypatch.setattr(triton_check, "_checked", set())
    monkeypatch.setattr(triton_check, "FAULTY", set())
    with pytest.warns(UserWarning, match="failed their check .*error 1.0..*'unit'.*head sizes 16 and 16"):
        o = vla(q, q, q, backend="triton").o
    assert torch.equal(o, vla(q, q, q, backend="chunked").o)


@pytest.mark.gpu
def test_a_check_that_finds_the_gpu_full_is_made_again(monkeypatch):
    q, check_error = torch.randn(1, 30, 2, 16, device="cuda"), triton_check.check_error
    monkeypatch.setattr(triton_check, "_checked", set())
    monkeypatch.setattr(triton_check, "FAULTY", set())

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(triton_check, "check_error", full)
    with pytest.raises(torch.OutOfMemoryError):
        vla(q, q, q)
    seen = []
    monkeypatch.setattr(triton_check, "check_error", lambda *x: seen.append(True) or check_error(*x))
    vla(q, q, q)
    assert seen == [True] and not triton_check.FAULTY


@pytest.mark.gpu
def test_same_bits_on_memory_poisoned_with_nan():
    leaves, options = make_inputs("unit", "normalized", 2, 203, 3, 64, 64)
    leaves = {key: None if x is None else x.to("cuda", torch.bfloat16) for key, x in leaves.items()}

    def once():
        tensors = {key: leaves[key].detach().clone().requires_grad_() for key in ("q", "k", "v", "u", "beta")}
        o = vla(**tensors, backend="triton", **options).o
        return [o.detach(), *torch.autograd.grad(o.float().square().sum(), list(tensors.values()))]

    first = once()
    poison = [torch.full((2**26,), float("nan"), device="cuda") for _ in range(8)]  # 2 GB for the allocator to reuse
    del poison
    for x, y in zip(once(), first):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_non_contiguous_input():
    x = torch.randn(2, 5, 100, 4, 64, device="cuda")  # [B, 4 kinds, T, H, D] seen as [B, T, H, D] of odd strides
    q, k, v, u = x[:, 1:].unbind(1)
    o = vla(q, k, v, u, backend="triton").o
    assert torch.equal(o, vla(*(y.contiguous() for y in (q, k, v, u)), backend="triton").o)


@pytest.mark.gpu
@pytest.mark.usefixtures("much_gpu_memory")
def test_offsets_past_two_to_the_31():
    """Takes about 100 GB of GPU memory."""
    if torch.cuda.get_device_properties(0).total_memory < 120e9:
        pytest.skip("a GPU of 120 GB is needed")  # smaller ones cannot hold tensors that long, with their gradients
    tokens, heads = 2**20 + 100, 32
    inputs = [torch.randn(1, tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    weight = torch.randn(1, 300, heads, 64, device="cuda")

    def last(bounds, inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        o = vla(*inputs, readout="headwise", cu_seqlens=bounds, backend="triton").o[:, -300:]
        return [x[:, -300:].float() for x in (o, *torch.autograd.grad((o.float() * weight).sum(), inputs))]

    alone = last(None, [x[:, -300:] for x in inputs])
    for x, y in zip(last(torch.tensor([0, tokens - 300, tokens]), inputs), alone):
        assert (x - y).norm() < 2e-2 * y.norm()  # A's way to the last tokens is another one


@pytest.mark.gpu
def test_the_host_waits_for_nothing():
    inputs = [torch.randn(2, 130, 4, 64, device="cuda", requires_grad=True) for _ in range(4)]
    penalty = torch.full((4,), 0.1, device="cuda", requires_grad=True)

    def step(state):
        found = vla(*inputs, penalty=penalty, readout="headwise", initial_state=state, output_final_state=True,
                    backend="triton")
        torch.autograd.grad(found.o.sum(), inputs if state else [*inputs, penalty])
        return found.final_state.detach()

    state = step(step(None))  # compiles and checks
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(None)
        step(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_compiles_to_one_graph():
    q, k, v, u = (torch.randn(2, 130, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))

    def f(*inputs):
        return vla(*inputs, readout="headwise", backend="triton").o

    compiled = torch.compile(f, fullgraph=True)
    plain = torch.autograd.grad(f(q, k, v, u).float().sum(), (q, k, v, u))
    for x, y in zip(torch.autograd.grad(compiled(q, k, v, u).float().sum(), (q, k, v, u)), plain):
        assert torch.equal(x, y)
    with torch.no_grad():  # leaves out what only a backward pass reads
        assert torch.equal(compiled(q, k, v, u), f(q, k, v, u))
