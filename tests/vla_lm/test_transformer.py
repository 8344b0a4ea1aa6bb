"""Shapes, sizes, and that a token sees its own document's past and nothing else, for every mixer in both styles."""

import pytest
import torch

from vla_lm.config import ModelConfig
from vla_lm.mixers import MIXERS
from vla_lm.transformer import Transformer

EVERY = [(style, mixer) for style in ("paper", "modern") for mixer in MIXERS]
VOCABULARY, LENGTH = 17, 12


def build(style="paper", mixer="vla", dtype=torch.float64, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_positions": 32, "chunk_size": 8}
    # Large weights, so that an error anywhere shows in the logits.
    model = Transformer(ModelConfig(**sizes | {"style": style, "mixer": mixer, "init_std": 0.3} | fields)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif not parameter.any():  # the branches' last matrices start from 0 in the modern style
                parameter.normal_(std=0.3)
    return model


def tokens(rows=2, length=LENGTH, seed=1):
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("style", "mixer"), EVERY)
def test_a_later_token_changes_no_earlier_logit(style, mixer):
    model, first = build(style, mixer), tokens()
    second = first.clone()
    second[:, 7:] = (second[:, 7:] + 1) % VOCABULARY
    before, after = model(first).logits, model(second).logits
    assert before.shape == (2, LENGTH, VOCABULARY)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize(("style", "mixer"), EVERY)
def test_packed_equals_separate_forward_and_gradients(style, mixer):
    model, rows = build(style, mixer), tokens()
    bounds = [0, 1, 6, 12, 14, 24]  # documents of one token, shorter than the convolution, and longer than a chunk
    weight = torch.randn(24, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    packed = model(rows, torch.tensor(bounds)).logits.flatten(0, 1)
    packed_gradients = torch.autograd.grad((packed * weight).sum(), list(model.parameters()))
    flat = rows.flatten()
    separate = torch.cat([model(flat[None, a:b]).logits[0] for a, b in zip(bounds, bounds[1:])])
    separate_gradients = torch.autograd.grad((separate * weight).sum(), list(model.parameters()))

    torch.testing.assert_close(packed, separate, rtol=1e-10, atol=1e-10)
    for got, wanted in zip(packed_gradients, separate_gradients):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9 * float(wanted.abs().max() + 1))


@pytest.mark.parametrize(("style", "mixer"), EVERY)
def test_a_row_in_parts_with_states_equals_the_whole(style, mixer):
    model, rows = build(style, mixer, output_gate=True, learn_penalty=MIXERS[mixer].penalised), tokens()
    whole = model(rows).logits
    states, parts = None, []
    for a, b in ((0, 2), (2, 7), (7, LENGTH)):
        out = model(rows[:, a:b], states=states, return_states=True)
        states = out.states
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    assert states[0].length.tolist() == [LENGTH, LENGTH]


@pytest.mark.parametrize(("style", "mixer"), EVERY)
@torch.no_grad()
def test_decoding_token_by_token_equals_the_parallel_pass(style, mixer):
    model, rows = build(style, mixer), tokens()
    states, logits = None, []
    for t in range(LENGTH):
        out = model(rows[:, t : t + 1], states=states, return_states=True)
        states = out.states
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), model(rows).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("style", ["paper", "modern"])
@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "softmax"])
def test_packed_documents_continue_from_their_states(style, mixer):
    # Rows of two documents; the first goes on in the next stretch, the second row's begins anew there.
    model, rows = build(style, mixer), tokens(2, 24)
    first = model(rows[:, :12], torch.tensor([0, 5, 12, 24]), return_states=True)
    of_rows = [state.index_select(torch.tensor([1, 2])) for state in first.states]
    documents = torch.tensor([0, 0, 1])
    second = model(
        rows[:, 12:], torch.tensor([0, 4, 12, 24]), states=[state.index_select(documents) for state in of_rows],
        fresh=torch.tensor([False, True, True]),
    ).logits
    row = rows[0]
    torch.testing.assert_close(second[0, :4], model(row[None, 5:16]).logits[0, 7:], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(second[0, 4:], model(row[None, 16:]).logits[0], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(second[1], model(rows[1:, 12:]).logits[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("style", "mixer"), EVERY)
def test_bfloat16_autocast_stays_near_float32(style, mixer):
    model, rows = build(style, mixer, dtype=torch.float32, init_std=0.02), tokens()
    exact = model(rows).logits
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(rows, torch.tensor([0, 12, 24])).logits.float()
    assert (rough - exact).norm() < 0.1 * exact.norm()


def test_paper_parameter_count():
    # The paper's setting: vocabulary 128, d_model 128, 4 heads, 2 layers, d_ff 256, tied embeddings, learned positions.
    model = Transformer(ModelConfig(vocab_size=128, max_positions=128))
    width, inner, norm = 128, 256, 2 * 128
    mixing = 5 * width * width + norm  # q, k, v, W_u, output; LayerNorm over the concatenated heads
    feed_forward = 2 * width * inner + inner + width
    wanted = 128 * width + 128 * width + 2 * (mixing + feed_forward + 2 * norm) + norm
    assert sum(p.numel() for p in model.parameters()) == wanted == 330_240


def test_initialisation_is_normal_with_the_configured_deviation_and_modern_branches_start_from_nothing():
    torch.manual_seed(0)
    for style in ("paper", "modern"):
        model = Transformer(ModelConfig(vocab_size=512, style=style, output_gate=True, learn_penalty=True, penalty=0.3))
        for name, parameter in model.named_parameters():
            if "convolution" in name:
                assert parameter.abs().max() <= 0.5 and parameter.std() > 0.2
            elif "log_penalty" in name:
                torch.testing.assert_close(parameter.exp(), torch.full_like(parameter, 0.3))
            elif "norm" in name:
                assert torch.equal(parameter, torch.full_like(parameter, float("bias" not in name))), name
            elif parameter.ndim == 1 or (style == "modern" and name.endswith(("to_out.weight", "down.weight"))):
                assert not parameter.any(), name
            else:
                assert abs(parameter.std() / 0.02 - 1) < 0.1 and abs(parameter.mean()) < 0.002, name


def test_learned_positions_restart_at_each_document_and_are_bounded():
    model = build("paper", "vla")
    row = tokens(1, 32)
    model(row)
    model(row.view(1, -1).repeat(1, 2).view(2, 32), torch.tensor([0, 32, 64]))
    with pytest.raises(ValueError, match="33 tokens .* max_positions 32"):
        model(tokens(1, 33))
    states = model(row, return_states=True).states
    with pytest.raises(ValueError, match="33 tokens"):
        model(row[:, :1], states=states)
    assert build("modern", "vla")(tokens(1, 40)).logits.shape == (1, 40, VOCABULARY)


def test_bad_tokens_states_and_boundaries_are_refused():
    model, rows = build(), tokens()
    with pytest.raises(TypeError, match="float32"):
        model(rows.float())
    with pytest.raises(ValueError, match="shape"):
        model(rows[0])
    with pytest.raises(ValueError, match="1 entries"):
        model(rows, states=model(rows, return_states=True).states[:1])
    for bounds, told in {
        (0, 12, 20): "from 0 to 20 .* the 24 tokens", (0, 12, 12, 24): "documents of 0 tokens",
        (0, 5, 24): "no boundary at 12", (0.0, 24.0): "integers",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=told):
            build(mixer="softmax")(rows, torch.tensor(bounds))
    with pytest.raises(ValueError, match="carry_state: false"):
        build(mixer="softmax")(rows, torch.tensor([0, 12, 24]), return_states=True)
    with pytest.raises(ValueError, match="vocab_size is null"):
        Transformer(ModelConfig())


def test_the_authors_variants_reach_the_operator():
    row = tokens()
    plain, short, refreshed = (
        build(**fields)(row).logits for fields in ({}, {"u_scale": "inverse_sqrt_d"}, {"refresh": (5, 0.1)})
    )
    assert not torch.allclose(plain, short) and torch.allclose(plain[:, :5], refreshed[:, :5])
    assert not torch.allclose(plain[:, 5:], refreshed[:, 5:])
    model = build(refresh=(5, 0.1))
    with pytest.raises(ValueError, match="refresh counts tokens from a row's start"):
        model(row, states=build()(row, return_states=True).states)


def test_diagnostics_come_per_layer_and_leave_the_logits_alone():
    model, rows = build("modern", "vla"), tokens()
    out = model(rows, diagnostics=True)
    assert list(out.diagnostics) == ["layers.0", "layers.1"]
    assert out.diagnostics["layers.0"].write_alignment.shape == (2, LENGTH, 2)
    torch.testing.assert_close(out.logits, model(rows).logits)
    assert build(mixer="softmax")(rows, diagnostics=True).diagnostics == {}


def test_learned_penalty_gets_a_gradient_also_through_carried_documents():
    model, rows = build("modern", "vla", learn_penalty=True), tokens()
    bounds = torch.tensor([0, 12, 24])
    states = [state.detach() for state in model(rows, bounds, return_states=True).states]
    fresh = torch.tensor([False, True])
    model(rows, bounds, states=states, fresh=fresh).logits.square().sum().backward()
    carried = model.layers[0].mixer.log_penalty.grad.clone()
    model.zero_grad()
    model(rows[1:]).logits.square().sum().backward()
    torch.testing.assert_close(carried, model.layers[0].mixer.log_penalty.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize(("style", "mixer"), EVERY)
def test_packed_equals_separate_in_bfloat16_on_the_gpu(style, mixer):
    penalty = 20.0 if mixer == "vla_v2" else 0.1  # the raw-key rule overflows at the usual one
    model = build(style, mixer, dtype=torch.bfloat16, d_model=64, init_std=0.05, penalty=penalty).cuda()
    rows, bounds = tokens(2, 32).cuda(), [0, 5, 32, 33, 64]
    packed = model(rows, torch.tensor(bounds).cuda()).logits.flatten(0, 1).float()
    flat = rows.flatten()
    separate = torch.cat([model(flat[None, a:b]).logits[0] for a, b in zip(bounds, bounds[1:])]).float()
    assert (packed - separate).norm() < 0.05 * separate.norm()
    packed.square().sum().backward()
