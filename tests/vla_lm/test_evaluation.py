"""Evaluators against sums written out by hand."""

import math

import pytest
import torch
from small import batches, language_model
from torch.nn import functional as F

from vla_lm.evaluation import mqar, perplexity


class Oracle:
    """Stands for a model that answers the given tokens with certainty."""

    device, training = torch.device("cpu"), True

    def __init__(self, answers):
        self.answers, self.modes = iter(answers), []

    def eval(self):
        self.modes.append("eval")

    def train(self, mode):
        self.modes.append(mode)

    def __call__(self, tokens, cu_seqlens=None):
        logits = 50.0 * F.one_hot(next(self.answers), 13).double()
        return type("Output", (), {"logits": logits})


def test_mqar_counts_queries_and_whole_rows():
    targets = torch.tensor([[-100, 3, 4], [-100, 5, 6], [-100, -100, -100], [7, -100, -100]])
    answers = torch.tensor([[0, 3, 4], [0, 5, 1], [1, 1, 1], [7, 0, 0]])
    model = Oracle([answers, answers])
    batch = {"tokens": answers, "targets": targets}
    found = mqar.evaluate(model, [batch, batch])
    assert (found["queries"], found["rows"]) == (10, 6)
    assert found["accuracy"] == pytest.approx(8 / 10) and found["exact_match"] == pytest.approx(4 / 6)
    assert found["loss"] == pytest.approx(50 * 2 / 10)
    assert model.modes == ["eval", True]


def test_mqar_needs_something_to_evaluate():
    for nothing in ([], [{"tokens": torch.zeros(1, 3).long(), "targets": torch.full((1, 3), -100)}]):
        with pytest.raises(ValueError, match="nothing to evaluate"):
            mqar.evaluate(language_model(), nothing)


def test_perplexity_in_bits_per_byte_and_by_position_in_the_document():
    model = language_model(style="modern")
    batch = batches(1, rows=2, length=12, seed=3)[0]
    batch |= {"cu_seqlens": torch.tensor([0, 5, 12, 24]), "target_bytes": torch.randint(0, 5, (2, 12))}
    found = perplexity.evaluate(model, [batch], buckets=[2, 6])

    logits = model(batch["tokens"], batch["cu_seqlens"]).logits
    nats = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none").detach()
    position = torch.tensor([*range(5), *range(7), *range(12)])
    valid, sizes = batch["targets"].flatten() != -100, batch["target_bytes"].flatten()
    assert found["loss"] == pytest.approx(float(nats.sum() / valid.sum()), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(float(nats.sum() / sizes[valid].sum()) / math.log(2), rel=1e-5)
    assert (found["targets"], found["bytes"]) == (int(valid.sum()), int(sizes[valid].sum()))
    assert [(part["start"], part["end"]) for part in found["by_position"]] == [(0, 2), (2, 6), (6, 12)]
    for part in found["by_position"]:
        inside = valid & (position >= part["start"]) & (position < part["end"])
        assert part["targets"] == int(inside.sum())
        assert part["loss"] == pytest.approx(float(nats[inside].sum() / inside.sum()), rel=1e-5)


def test_perplexity_refuses_falling_buckets_and_empty_batches():
    with pytest.raises(ValueError, match="rising positions"):
        perplexity.evaluate(language_model(), [], buckets=[8, 4])
    with pytest.raises(ValueError, match="nothing to evaluate"):
        perplexity.evaluate(language_model(), [])
