"""The fused recurrent kernel: in Triton's interpreter on any machine, and on a GPU (marker `gpu`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import VARIANTS, make_inputs, relative_errors

from kernels import vla, vla_step
from tests.interpreter import found_by

pytest.importorskip("triton")

from recurrent_cases import CPU_CASES, decoding, errors  # noqa: E402

HERE = Path(__file__).parent

GPU_CASES = {f"{variant}, {readout}": (variant, readout, (2, 53, 3, 64, 64), False, None)
             for variant in VARIANTS for readout in ("normalized", "headwise")}
GPU_CASES |= {
    f"sizes {dk} and {dv}, {readout}": ("unit", readout, (2, 40, 2, dk, dv), True, None)
    for dk, dv in ((16, 16), (16, 64), (32, 32), (32, 128), (64, 16), (64, 64), (64, 128), (128, 32), (128, 128))
    for readout in ("normalized", "headwise")}
GPU_CASES |= {
    "key, 128": ("gain-key", "headwise", (2, 40, 2, 128, 128), True, None),
    "fixed, 128": ("fixed", "normalized", (2, 40, 2, 128, 128), True, None),
    "packed": ("unit", "headwise", (1, 1400, 2, 64, 64), True, (0, 1, 65, 200, 263, 1300, 1400)),
    "packed, normalized": ("gain-key", "normalized", (1, 1400, 2, 64, 64), True, (0, 1, 65, 200, 263, 1300, 1400)),
    "4096 tokens": ("unit", "headwise", (2, 4096, 2, 64, 64), True, None),
    "4096 tokens, keys": ("unit-key", "normalized", (1, 4096, 2, 64, 64), False, None),
    "4096 tokens, 128": ("unit", "normalized", (1, 4096, 1, 128, 128), False, None),
    "one token": ("unit", "headwise", (4, 1, 4, 64, 64), True, None),
}
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # o in half precision is rounded to it


@pytest.fixture(scope="module")
def interpreted():
    """What recurrent_cases.py finds, from a process that had TRITON_INTERPRET=1 before Triton was imported."""
    return found_by(HERE / "recurrent_cases.py")


def wrong(found, bound):
    return {key: error for key, error in found.items() if not error < bound}


@pytest.mark.parametrize("name", CPU_CASES)
def test_equals_the_token_loop_in_the_interpreter(interpreted, name):
    assert wrong(interpreted[name], 2e-6) == {}


def test_half_precisions_in_the_interpreter(interpreted):
    assert wrong(interpreted["bfloat16"], 1e-2) == {} and interpreted["bfloat16"]["S_T"] < 2e-6
    assert wrong(interpreted["float16"], 1e-3) == {} and interpreted["float16"]["S_T"] < 2e-6


def test_decoding_keeps_a_float64_matrix_in_the_interpreter(interpreted):
    assert wrong(interpreted["decoding"], 2e-6) == {} and interpreted["decoding"]["A"] < 1e-14


def test_compiled_and_self_checked_in_the_interpreter(interpreted):
    assert interpreted["compiled"] == 0  # fullgraph=True, the same to the bit
    assert interpreted["self-check"] < 1e-5


def test_no_gradient_is_said_in_the_interpreter(interpreted):
    message = interpreted["gradient"]
    assert "computes no gradient" in message and "backend='triton' or 'chunked'" in message


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels take CPU tensors")
def test_what_the_kernel_does_not_take_is_said():
    q = torch.randn(1, 3, 1, 16)
    with pytest.raises(ValueError, match="'recurrent' takes CUDA tensors only, not cpu ones.*backend='chunked'"):
        vla(q, q, q, backend="recurrent")
    with pytest.raises(ValueError, match="head sizes 16, 32, 64, 128 only, not 16 .keys. and 24 .values."):
        vla(q, q, torch.randn(1, 3, 1, 24), backend="recurrent")
    with pytest.raises(ValueError, match="not float64"):
        vla(q.double(), q.double(), q.double(), backend="recurrent")


def test_without_triton_the_rest_works():
    code = """
import sys
sys.modules["triton"] = None
import torch
from kernels import vla, vla_step
from tests.interpreter import found_by
q = torch.randn(1, 1, 1, 16)
vla_step(q, q, q)
try:
    vla(q, q, q, backend="recurrent")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], capture_output=True, text=True)
    assert "'recurrent' needs the package triton, which is not installed" in done.stdout, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", GPU_CASES)
def test_equals_the_reference(name, dtype):
    found = errors(name, GPU_CASES, dtype, "cuda")
    bound = BOUNDS[dtype] * (5 if "4096" in name else 1)  # float32 S over 4,096 steps
    assert wrong(found, bound) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("d", [16, 32, 64, 128])
@pytest.mark.parametrize("rank", [1, 4, None])
def test_decoding_on_cuda(rank, d):
    found = decoding(tokens=64, past=4096, rank=rank or d, device="cuda", d=d)
    assert wrong(found, 1e-4) == {} and found["A"] < 1e-10


@pytest.mark.gpu
def test_decoding_adds_no_error_over_many_steps():
    # 4,000 tokens in one launch from a state, against the sum itself inverted (as for `vla_step` in test_precision.py).
    d, tokens = 64, 4_000
    u = torch.nn.functional.normalize(torch.randn(1, tokens, 1, 3) @ torch.randn(3, d), dim=-1).cuda()
    q = torch.ones_like(u)
    A = vla(q, q, q, u, readout="headwise", output_final_state=True, backend="recurrent").final_state
    unit = torch.nn.functional.normalize(u[0, :, 0].double(), dim=-1)
    M = 0.1 * torch.eye(d, dtype=torch.float64, device="cuda") + unit.mT @ unit
    a, truth = A.full_penalty_inverse()[0, 0] @ unit[0], torch.linalg.solve(M, unit[0])
    assert (a - truth).norm() < 1e-6 * truth.norm()


@pytest.mark.gpu
def test_step_uses_the_kernel_and_leaves_gradients_to_pytorch():
    from kernels import triton_recurrent

    leaves, options = make_inputs("unit", "normalized", 2, 1, 2, 64, 64, dtype=torch.float32)
    x = {name: leaves[name].cuda() for name in "qkvu"}
    with torch.no_grad():
        found = vla_step(**x, **options)
    assert any(verdict for key, verdict in triton_recurrent._verdicts.items() if key[0].type == "cuda")
    truth = vla_step(**{name: y.double().cpu() for name, y in x.items()}, **options)
    assert wrong(relative_errors({"o": found.o, "S": found.final_state.S}, {"o": truth.o, "S": truth.final_state.S}),
                 1e-5) == {}
    x["v"].requires_grad_()
    assert vla_step(**x, **options).o.requires_grad
    with pytest.raises(ValueError, match="computes no gradient"):
        vla(**x, **options, backend="recurrent")


@pytest.mark.gpu
def test_same_bits_on_memory_poisoned_with_nan():
    leaves, options = make_inputs("unit", "normalized", 2, 53, 3, 64, 128, with_state=False)
    x = {key: leaves[key].to("cuda", torch.bfloat16) for key in ("q", "k", "v", "u", "beta")}

    def once():
        output = vla(**x, backend="recurrent", output_final_state=True, **options)
        return output.o, output.final_state.S, output.final_state.A, output.final_state.z

    first = once()
    poison = [torch.full((2**26,), float("nan"), device="cuda") for _ in range(4)]  # 1 GB for the allocator to reuse
    del poison
    for a, b in zip(once(), first):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_non_contiguous_input():
    x = torch.randn(2, 5, 20, 4, 64, device="cuda")
    q, k, v, u = x[:, 1:].unbind(1)
    o = vla(q, k, v, u, backend="recurrent").o
    assert torch.equal(o, vla(*(y.contiguous() for y in (q, k, v, u)), backend="recurrent").o)


@pytest.mark.gpu
@pytest.mark.usefixtures("much_gpu_memory")
def test_offsets_past_two_to_the_31():
    """Takes about 17 GB of GPU memory."""
    tokens, heads = 2**20 + 100, 32
    q, k, v = (torch.randn(1, tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bounds = torch.tensor([0, tokens // 2, tokens - 300, tokens])
    with torch.no_grad():
        options = dict(write_rule="linear", readout="headwise", backend="recurrent")
        whole = vla(q, k, v, cu_seqlens=bounds, **options).o[:, -300:]
        alone = vla(*(x[:, -300:] for x in (q, k, v)), **options).o
    assert torch.equal(whole, alone)


@pytest.mark.gpu
def test_decoding_in_a_cuda_graph():
    q, k, v, u = (torch.randn(4, 1, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    options = dict(readout="headwise")
    with torch.no_grad():
        state = vla_step(q, k, v, u, **options).final_state
        expected = vla_step(q, k, v, u, state, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = vla_step(q, k, v, u, state, **options)
        graph.replay()
    assert torch.equal(captured.o, expected.o) and torch.equal(captured.final_state.A, expected.final_state.A)
