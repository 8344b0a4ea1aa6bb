"""The short convolution in one launch: in Triton's interpreter on any machine, and on a GPU (marker `gpu`)."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.interpreter import found_by
from vla_lm.convolution import ShortConvolution

pytest.importorskip("triton")

from convolution_cases import CASES, FAULTS, errors  # noqa: E402

HERE = Path(__file__).parent
# float32: rounding; half precision: y, dx and the gradient before the SiLU are rounded to it.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def interpreted():
    return found_by(HERE / "convolution_cases.py")


@pytest.mark.parametrize("name", CASES)
def test_equals_its_definition_in_the_interpreter(interpreted, name):
    assert {key: error for key, error in interpreted[name].items() if not error < BOUNDS[torch.float32]} == {}


def test_compiled_in_the_interpreter(interpreted):
    assert interpreted["compiled"] == 0


@pytest.mark.parametrize("name", FAULTS)
def test_kernels_that_fail_their_check_are_left_to_pytorch(interpreted, name):
    message, same, faulty = interpreted["failing"][name]
    assert "failed their check against PyTorch" in message and "torch.float32, width 4, 16 channels" in message
    assert same and faulty == 1


def test_no_tokens(interpreted):
    assert interpreted["empty"] == [[2, 0, 16], True, 96.0] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_its_definition(name, dtype):
    assert {key: error for key, error in errors(name, "cuda", dtype).items() if not error < BOUNDS[dtype]} == {}


@pytest.mark.gpu
def test_on_a_device_that_is_not_the_current_one():
    """And checked before it, in a thread of its own, which begins on the first device."""
    last = f"cuda:{torch.cuda.device_count() - 1}"
    with torch.cuda.device(0):
        assert max(errors("packed, tail", last, torch.float32).values()) < BOUNDS[torch.float32]


@pytest.mark.gpu
@pytest.mark.usefixtures("much_gpu_memory")
def test_past_two_to_the_31_elements():
    """Addresses past 32 bits: the last tokens of 2³¹ + elements are those of a short call. About 25 GB."""
    channels = 2304
    tokens = (1 << 31) // channels + 100
    module = ShortConvolution(channels, 4).cuda()
    x = torch.empty(1, tokens, channels, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    y, _ = module(x)
    y[0, -50:].float().square().sum().backward()
    last = nn.Parameter(x[:, -60:].detach())
    expected, _ = module(last)
    assert torch.equal(y[0, -50:], expected[0, -50:])
    expected[0, -50:].float().square().sum().backward()
    assert torch.equal(x.grad[0, -50:], last.grad[0, -50:])
