"""The chunked backend against the token loop in float64: outputs, final states, every gradient."""

import pytest
import torch
from kernel_cases import VARIANTS, assert_close, make_inputs, run

from kernels import vla

READOUTS = ("normalized", "headwise")
# T, head sizes of keys and values, batch, heads; each length with its own head size.
SHAPES = {1: (16, 8, 2, 2), 63: (32, 32, 2, 1), 64: (24, 40, 1, 2), 100: (128, 64, 1, 1), 257: (64, 64, 1, 1)}


@pytest.mark.parametrize("tokens", SHAPES)
@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_token_loop(variant, readout, tokens):
    dk, dv, rows, heads = SHAPES[tokens]
    with_state = tokens in (63, 100)  # without one, λ0 has a gradient
    leaves, options = make_inputs(variant, readout, rows, tokens, heads, dk, dv, with_state=with_state)
    truth = run(leaves, options, backend="reference")
    assert ("dA" in truth) == (with_state and options["write_rule"] in ("unit", "gain", "mesa"))
    assert_close(run(leaves, options, backend="chunked"), _no_missing(truth, leaves), 1e-12)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_token_loop_when_packed(variant, readout, with_state):
    cu_seqlens = torch.tensor([0, 5, 6, 38, 54, 119])  # lengths 5, 1, 32, 16, 65 on chunks of 16
    leaves, options = make_inputs(variant, readout, 1, 119, 2, 16, 24, sequences=5, with_state=with_state, seed=3)
    options |= dict(cu_seqlens=cu_seqlens, chunk_size=16)
    truth = run(leaves, options, backend="reference")
    assert_close(run(leaves, options, backend="chunked"), _no_missing(truth, leaves), 1e-12)


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64, 200])
def test_chunk_size_does_not_change_the_result(chunk_size):
    leaves, options = make_inputs("unit", "headwise", 2, 50, 2, 16, 16)
    truth = run(leaves, options, backend="reference")
    assert_close(run(leaves, options, backend="chunked", chunk_size=chunk_size), truth, 1e-12)


@pytest.mark.parametrize("tokens", [1, 8])
def test_the_paper_s_unstable_rule_where_it_stays_finite(tokens):
    # VLA v2 at its own settings (λ0 = 0.1, no β): S grows about a hundredfold a token.
    leaves, options = make_inputs("gain-raw", "headwise", 1, tokens, 1, 16, 16, gates=False)
    leaves["penalty"] /= 1000
    truth = run(leaves, options, backend="reference")
    assert_close(run(leaves, options, backend="chunked"), truth, 1e-11)  # conditioning: ‖S_8‖ is near 1e13


@pytest.mark.parametrize("feature_map", ["elu1", "silu", "identity"])
def test_feature_maps(feature_map):
    leaves, options = make_inputs("unit-key", "headwise", 1, 70, 2, 16, 16)
    options["feature_map"] = feature_map
    assert_close(run(leaves, options, backend="chunked"), run(leaves, options, backend="reference"), 1e-12)


@pytest.mark.parametrize("zeros", ["q", "k", "v", "u", "beta", "g"])
def test_zero_inputs(zeros):
    leaves, options = make_inputs("unit", "headwise", 1, 40, 1, 8, 8)
    leaves[zeros].zero_()
    options["feature_map"] = "identity"  # so that a zero key is a zero feature, which has no direction
    results = run(leaves, options, backend="chunked", chunk_size=16)
    assert all(torch.isfinite(x).all() for x in results.values())
    assert_close(results, run(leaves, options, backend="reference"), 1e-12)


def test_no_loss_on_the_output_still_gives_the_state_s_gradient():
    leaves, options = make_inputs("unit", "normalized", 1, 40, 1, 8, 8)
    grads = []
    for backend in ("reference", "chunked"):
        k, u = leaves["k"].clone().requires_grad_(), leaves["u"].clone().requires_grad_()
        final = vla(leaves["q"], k, leaves["v"], u, output_final_state=True, chunk_size=16, backend=backend).final_state
        (final.A.square().sum() + final.S.sin().sum() + final.z.square().sum()).backward()
        grads.append({"k": k.grad, "u": u.grad})
    assert_close(grads[1], grads[0], 1e-12)


def test_gradients_are_the_same_bits_every_time():
    leaves, options = make_inputs("unit", "headwise", 1, 119, 2, 16, 16, sequences=3)
    options |= dict(cu_seqlens=torch.tensor([0, 50, 51, 119]), chunk_size=16)
    first, second = run(leaves, options), run(leaves, options)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _no_missing(truth, leaves):
    """The token loop leaves out the gradient of what it never used (λ0 with a state); the chunked form must too."""
    if leaves["A"] is not None:
        assert "dpenalty" not in truth
    return truth
