"""A NaN stops the run before the update, with the step, the layer and the checkpoint in the message."""

import time

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from callbacks import FiniteGuard, NonFiniteError, RunCheckpoint
from vla_lm import checkpoint_io
from tests.callbacks.tiny import TinyData, TinyModel, trainer


class LastWeights(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_stops_before_the_update(tmp_path, what, accumulation):
    seed_everything(1, verbose=False)
    model, last = TinyModel(poison=(4, what)), LastWeights()
    callbacks = [FiniteGuard(), RunCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3), last]
    run = trainer(tmp_path, 8, callbacks, accumulate_grad_batches=accumulation, gradient_clip_val=1.0)
    with pytest.raises(NonFiniteError) as error:
        run.fit(model, datamodule=TinyData(step_rows=4, micro=4 // accumulation))
    assert error.value.step == 5
    assert error.value.layer == ("layers.0" if what == "gradient" else "head")
    text = str(error.value)
    assert "optimizer step 5 before the update" in text and "step=000003.ckpt" in text
    assert ("the loss is not finite on rank 0" in text) == (what == "loss")
    if what == "gradient":
        assert "in 1 of 9 parameters, nearest to the loss layers.0.weight (layer layers.0)" in text
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, last.weights[name]) and parameter.isfinite().all()


def test_without_a_checkpoint_it_says_so(tmp_path):
    with pytest.raises(NonFiniteError, match="step 1 .*No checkpoint had been saved yet"):
        trainer(tmp_path, 2, [FiniteGuard()]).fit(TinyModel(poison=(0, "loss")), datamodule=TinyData())


def test_what_is_being_written_is_the_last_good_one(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_io, "LARGE", 0)

    def slow(state, path, save=torch.save):
        time.sleep(1)
        save(state, path)

    monkeypatch.setattr(torch, "save", slow)
    callbacks = [FiniteGuard(), RunCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2)]
    with pytest.raises(NonFiniteError, match="Last good checkpoint: .*step=000002.ckpt"):
        trainer(tmp_path, 8, callbacks).fit(TinyModel(poison=(2, "loss")), datamodule=TinyData())


def test_one_host_sync_a_step_and_the_same_training(tmp_path, monkeypatch):
    def fit(callbacks):
        seed_everything(1, verbose=False)
        model = TinyModel()
        trainer(tmp_path, 3, callbacks, accumulate_grad_batches=2, limit_val_batches=0, log_every_n_steps=100).fit(
            model, datamodule=TinyData(step_rows=4, micro=2)
        )
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    counted, read, truth = [], torch.Tensor.item, torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "item", lambda self: counted.append("item") or read(self))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: counted.append("bool") or truth(self))
    plain = fit([])
    without, counted[:] = len(counted), []
    assert torch.equal(plain, fit([FiniteGuard()]))
    assert len(counted) - without == 3
