"""How the comparison before the kernels' first use is judged."""

import math

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton_verdict import found_right  # noqa: E402

KNOWN = dict(bound=1e-2, device=torch.device("cpu"), what="rule 'unit'", instead="PyTorch's is used")


@pytest.mark.parametrize("error, right", [(0.0, True), (1e-2, True), (2e-2, False), (math.inf, False),
                                          (math.nan, False)])
def test_an_error_is_right_up_to_the_bound(error, right, recwarn):
    assert found_right(lambda: error, **KNOWN) is right
    assert len(recwarn) == (not right)


def test_a_kernel_that_does_not_launch_is_not_right():
    def check(size):
        raise RuntimeError(f"out of resource: shared memory, Required: {size}")

    with pytest.warns(UserWarning, match="failed their check .*out of resource: shared memory, Required: 300.*'unit'"):
        assert not found_right(check, 300, **KNOWN)


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB"),
                                     RuntimeError("Triton Error [CUDA]: out of memory")])
def test_a_full_gpu_is_no_verdict(failure, monkeypatch, recwarn):
    given_back, failures = [], [failure]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))

    def check():
        if failures:
            raise failures.pop()
        return 0.0

    assert found_right(check, **KNOWN) and given_back == [True]  # what PyTorch kept sufficed
    failures[:] = [failure, failure]
    with pytest.raises(type(failure), match="out of memory"):
        found_right(check, **KNOWN)
    assert not recwarn


def test_the_callers_autocast_and_inference_mode_do_not_reach_the_check():
    def check():
        return 0.0 if torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") else 1.0

    with torch.inference_mode(), torch.autocast("cpu"):
        assert found_right(check, **KNOWN)
