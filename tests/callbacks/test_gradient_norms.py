"""Norms before clipping against autograd by hand, at optimizer steps only, and the clip rate."""

import pytest
from lightning.pytorch import Callback, seed_everything

from callbacks import GradientNorms
from callbacks.gradients import layer_of
from tests.callbacks.tiny import TinyData, TinyModel, trainer


class Witness(Callback):
    """The same norms by hand, and what was logged."""

    def __init__(self):
        self.by_hand, self.logged = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norms = {}
        for name, p in pl_module.named_parameters():
            norms.setdefault(layer_of(name), []).append(p.grad.double().square().sum())
        norms = {layer: sum(squares).sqrt().item() for layer, squares in norms.items()}
        self.by_hand.append(norms | {"global": sum(n**2 for n in norms.values()) ** 0.5})

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step > len(self.logged):
            self.logged.append({k.removeprefix("gradient_norm/"): v.item() for k, v in trainer.callback_metrics.items()
                                if k.startswith("gradient_norm/")})  # fmt: skip


def run(tmp_path, steps=6, accumulation=1, clip=None, every=1):
    seed_everything(1, verbose=False)
    witness = Witness()
    data = TinyData(step_rows=4, micro=4 // accumulation)
    fit = trainer(tmp_path, steps, [witness, GradientNorms()], accumulate_grad_batches=accumulation,
                  gradient_clip_val=clip, log_every_n_steps=every, limit_val_batches=0)  # fmt: skip
    fit.callbacks.append(fit.callbacks.pop(fit.callbacks.index(witness)))  # reads after GradientNorms logged
    fit.fit(TinyModel(), datamodule=data)
    return witness


@pytest.mark.parametrize("accumulation", [1, 2])
def test_norms_are_those_of_the_whole_step_before_clipping(tmp_path, accumulation):
    witness = run(tmp_path, accumulation=accumulation, clip=1e-3)
    assert len(witness.by_hand) == len(witness.logged) == 6
    for by_hand, logged in zip(witness.by_hand, witness.logged):
        assert set(logged) == {"embedding", "layers.0", "layers.1", "norm", "head", "global", "clip_rate"}
        for name, value in by_hand.items():
            assert logged[name] == pytest.approx(value, rel=1e-5)
        assert logged["global"] > 1e-3 and logged["clip_rate"] == 1


def test_clip_rate_is_the_share_of_steps_since_the_last_logging(tmp_path):
    norms = [step["global"] for step in run(tmp_path / "a").by_hand]
    clip = sorted(norms[:3])[1]  # the middle one of the first three: one lies above
    logged = run(tmp_path / "b", steps=3, clip=clip * 1.0001, every=3).logged
    assert logged[0] == logged[1] == {} and logged[2]["clip_rate"] == pytest.approx(1 / 3)


def test_no_clip_rate_without_clipping(tmp_path):
    assert "clip_rate" not in run(tmp_path, steps=1).logged[0]


@pytest.mark.parametrize(
    "name, layer",
    [
        ("model.layers.11.mixer.q.weight", "layers.11"),
        ("model.embedding.weight", "embedding"),
        ("_orig_mod.model.norm.weight", "norm"),
        ("model.head.weight", "head"),
        ("scale", "scale"),
        ("head.bias", "head"),
    ],
)
def test_layer_of(name, layer):
    assert layer_of(name) == layer
