"""What a cut-off validation would have measured is measured at the resume: once, at its step, and scored."""

import pytest
from lightning.pytorch import Callback, seed_everything

from callbacks import JsonlLogger, MissedValidation, RunCheckpoint, newest_complete, read_marker, read_metrics
from tests.callbacks.tiny import TinyData, TinyModel, trainer


class Cut(Callback):
    """Ends the run in the hook of that name after `step` steps, as a kill would: without what comes after it."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step
        setattr(self, hook, self._end)

    def _end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def fit(folder, steps, *more, every=2, interval=4, accumulation=2, resume="newest", **settings):
    """One start of the run in `folder`, from its newest checkpoint."""
    seed_everything(1, verbose=False)
    start = newest_complete(folder) if resume == "newest" else resume
    saver = RunCheckpoint(folder / "checkpoints", every_n_train_steps=every, keep_last=9)
    log = JsonlLogger(folder, read_marker(start)["step"] if start else None)
    run = trainer(folder, steps, [*more, MissedValidation(saver, log.path), saver], logger=[log],
                  val_check_interval=interval * accumulation, accumulate_grad_batches=accumulation, **settings)
    try:
        run.fit(TinyModel(), datamodule=TinyData(step_rows=4, micro=4 // accumulation), ckpt_path=start)
    except (KeyboardInterrupt, SystemExit):
        log.save()
    return run


def logged(folder, name):
    return [(line["step"], line[name]) for line in read_metrics(folder / "metrics.jsonl") if name in line]


def score(folder, step):
    return read_marker(folder / f"checkpoints/step={step:06d}.ckpt").get("score")


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_end", "on_validation_end"])
def test_a_validation_amid_the_run_and_the_last(hook, tmp_path):
    for step in (4, 8):
        fit(tmp_path, 8, Cut(hook, step))
        assert newest_complete(tmp_path).name == f"step=00000{step}.ckpt" and score(tmp_path, step) is None
    for _ in range(2):  # once
        assert fit(tmp_path, 8).global_step == 8
        found = dict(logged(tmp_path, "val/loss"))
        assert [step for step, _ in logged(tmp_path, "val/loss")] == [4, 8]
        assert [step for step, _ in logged(tmp_path, "train/loss")] == list(range(1, 9))
        assert [score(tmp_path, step) for step in (2, 4, 6, 8)] == [None, found[4], None, found[8]]


def test_where_nothing_is_made_up(tmp_path):
    fit(tmp_path, 8)
    before, log = (tmp_path / "metrics.jsonl").read_text(), tmp_path / "metrics.jsonl"
    old = tmp_path / "checkpoints/step=000004.ckpt"

    def without(step):
        log.write_text("".join(line for line in before.splitlines(True)
                               if not (f'"step": {step},' in line and "val/" in line)))

    without(4)
    fit(tmp_path, 4, resume=old)  # nothing is left to train, and later checkpoints are there
    assert logged(tmp_path, "train/loss")[-1][0] == 8 and newest_complete(tmp_path).name == "step=000008.ckpt"
    without(8)
    for settings in ({"interval": 5}, {"limit_val_batches": 0}, {"fast_dev_run": True}):
        fit(tmp_path, 8, **settings)
        assert [step for step, _ in logged(tmp_path, "val/loss")] == [4], settings
    other = tmp_path / "other"
    fit(other, 8, resume=tmp_path / "checkpoints/step=000008.ckpt")
    assert not (other / "metrics.jsonl").exists(), "not its own checkpoint"
    fit(tmp_path, 8)
    assert [step for step, _ in logged(tmp_path, "val/loss")] == [4, 8]


def test_a_failed_start_leaves_nothing_behind(tmp_path):
    fit(tmp_path, 4)
    saver = RunCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2)
    run = trainer(tmp_path, 8, [MissedValidation(saver, tmp_path / "metrics.jsonl"), saver], val_check_interval=4)
    (tmp_path / "bad.ckpt").write_text("no checkpoint")
    with pytest.raises(Exception):
        run.fit(TinyModel(), datamodule=TinyData(4, 4), ckpt_path=tmp_path / "bad.ckpt")
    run.fit(TinyModel(), datamodule=TinyData(4, 4), ckpt_path=newest_complete(tmp_path))
    assert run.global_step == 8
