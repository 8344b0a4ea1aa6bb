"""Schedules are functions of the step alone; decay touches matrices alone."""

import math

import pytest
import torch

from vla_lm.config import ModelConfig, OptimizerConfig
from vla_lm.optimization import build_optimizer, check_learning_rate, learning_rate_factor, parameter_groups, schedule
from vla_lm.transformer import Transformer


def factors(steps=100, **fields):
    return [learning_rate_factor(OptimizerConfig(**fields), step, steps) for step in range(steps + 1)]


def test_warm_up_rises_by_optimizer_steps():
    assert factors(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_falls_from_the_peak_to_the_end():
    got = factors(warmup_steps=20, schedule="cosine", min_ratio=0.1)
    assert got[20] == 1.0 and got[100] == pytest.approx(0.1) and got[60] == pytest.approx(0.55)
    assert got[40] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert got[20:] == sorted(got[20:], reverse=True)


def test_warm_up_stable_decay():
    got = factors(warmup_steps=10, schedule="wsd", decay_fraction=0.2)
    assert got[10:81] == [1.0] * 71
    assert got[90] == pytest.approx(0.5) and got[100] == 0.0


def test_constant_needs_no_number_of_steps_and_the_others_do():
    assert schedule(OptimizerConfig(schedule="constant", warmup_steps=0), -1)(10**6) == 1.0
    with pytest.raises(ValueError, match="max_steps, which is -1"):
        schedule(OptimizerConfig(), -1)
    with pytest.raises(ValueError, match="warmup_steps 300 leaves nothing of trainer.max_steps 200"):
        schedule(OptimizerConfig(), 200)


@pytest.mark.parametrize("style", ["paper", "modern"])
@pytest.mark.parametrize("tied", [True, False])
def test_norms_biases_embeddings_and_vectors_are_not_decayed(style, tied):
    model = Transformer(ModelConfig(
        vocab_size=9, d_model=8, n_heads=2, style=style, tie_embeddings=tied, learn_penalty=True, decay=True,
        readout="headwise", output_gate=True, conv_width=4,
    ))  # fmt: skip
    decayed, others = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert sorted(id(p) for p in decayed["params"] + others["params"]) == sorted(names)
    for parameter in decayed["params"]:
        name = names[id(parameter)]
        words = ("norm", "embedding", "positions", "bias")
        assert parameter.ndim == 2 and not any(word in name for word in words), name
    for parameter in others["params"]:
        name = names[id(parameter)]
        words = ("norm", "embedding", "positions", "bias", "log_penalty", "log_rate")
        assert any(word in name for word in words), name
    assert any("head.weight" in names[id(p)] for p in decayed["params"]) is not tied


def test_the_restored_learning_rate_must_be_the_schedules():
    config = OptimizerConfig(learning_rate=1e-3, warmup_steps=4)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(config, 20))
    for _ in range(7):
        optimizer.step()
        scheduler.step()
    check_learning_rate(optimizer, config, 7, 20)
    with pytest.raises(ValueError, match="learning rate at step 7 .* max_steps it was trained"):
        check_learning_rate(optimizer, config, 7, 30)
