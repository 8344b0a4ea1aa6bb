"""Blocks computed again in the backward pass: the same bits, less memory. Under ZeRO-3 and DDP: tests/distributed."""

import pytest
import torch

from tests.vla_lm.small import VOCABULARY, batches, carried_batches, language_model
from vla_lm.metrics import token_losses


def twins(**fields):
    plain, again = (language_model(activation_checkpointing=on, **fields) for on in (False, True))
    again.load_state_dict(plain.state_dict())
    return plain, again


def gradients(model, batch, states=None):
    """Loss, gradients by name and states of one batch."""
    model.zero_grad()
    out = model(batch["tokens"], batch.get("cu_seqlens"), states=states, return_states="cu_seqlens" in batch)
    loss = token_losses(out.logits, batch["targets"]).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, out.states


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys() and all(torch.equal(found[1][n], g) for n, g in expected[1].items())


@pytest.mark.parametrize("style", ["paper", "modern"])
@pytest.mark.parametrize("mixer", ["vla", "deltanet", "softmax"])
def test_the_same_gradients_to_the_bit(style, mixer):
    plain, again = twins(style=style, mixer=mixer)
    batch, = batches(1)
    assert_same(gradients(again, batch), gradients(plain, batch))
    assert all(g.any() for g in gradients(again, batch)[1].values()), "every parameter has a gradient"


def test_with_carried_states_of_packed_documents():
    plain, again = twins(style="modern", output_gate=True)
    _, steps = carried_batches([[20, 12], [32]], rows=2, length=16, steps=2)
    results = []
    for model in (again, plain):
        first = gradients(model, steps[0])
        index = (steps[1]["cu_seqlens"][:-1] // 16).clamp(max=1)
        states = [state.detach().index_select(index) for state in first[2]]
        second = gradients(model, steps[1], states)
        results.append((first, second))
    for found, expected in zip(*results):
        assert_same(found, expected)
        for here, there in zip(found[2], expected[2]):
            assert all(torch.equal(t, there.tensors()[name]) for name, t in here.tensors().items())


def test_diagnostics_come_as_before_and_draw_nothing():
    plain, again = twins(style="modern")
    batch, = batches(1)
    before = torch.get_rng_state()
    found, expected = again.probe(batch), plain.probe(batch)
    gradients(again, batch)
    assert torch.equal(torch.get_rng_state(), before), (
        "training draws no random numbers, so a resume needs no generator")
    assert found.keys() == expected.keys() == {"layers.0", "layers.1"}
    assert torch.equal(found["layers.1"].state_norm, expected["layers.1"].state_norm)


def test_less_is_kept_for_the_backward_pass():
    def kept(model):
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.randint(VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(0))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(tokens).logits
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return sum(size for place, size in storages.items() if place not in weights), logits

    plain, again = twins(style="modern", n_layers=6, d_model=32)
    full, few = kept(plain)[0], kept(again)[0]
    assert few < full / 8, f"{few} of {full} bytes"


@pytest.mark.slow
def test_compiled():
    plain, again = twins(style="modern")
    again.transformer.compile_blocks()
    batch, = batches(1)
    found, expected = gradients(again, batch), gradients(plain, batch)
    assert found[0] == pytest.approx(float(expected[0]), rel=1e-5)
    for name, gradient in expected[1].items():
        assert torch.allclose(found[1][name], gradient, atol=1e-5, rtol=1e-4), name
