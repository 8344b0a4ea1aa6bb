"""Saves a run so that a kill at any moment, or a full disk, leaves the older checkpoint usable."""

import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import distributed

from callbacks.allocated import saved
from callbacks.retention import make_room, monitored, note_score, prune, set_aside_later
from callbacks.together import together
from vla_lm.checkpoint_files import publish, remove, step_of
from vla_lm.checkpoint_io import WAIT, RunCheckpointIO

ENDING = 60.0  # seconds that a failed run waits for the file it is writing


class RunCheckpoint(ModelCheckpoint):
    """Saves ``step=000500.ckpt`` every ``every_n_train_steps`` optimizer steps and at the end of training.

    The files are those of :mod:`vla_lm.checkpoint_files`; ``last.ckpt`` is a link to the newest. Training stands still
    for a copy in host memory (for ``checkpoint/stall_s`` seconds) and goes on while it is written; the marker comes
    when all ranks have finished. A write that fails on one rank raises ``CheckpointError`` on all at the end of the
    step it is noticed in. What is past the step a run starts from is of an abandoned continuation: ``….superseded``.

    Args:
        dirpath: Folder of the checkpoints; null: ``checkpoints`` in the trainer's ``default_root_dir``.
        every_n_train_steps: Optimizer steps from one checkpoint to the next; the end of training is saved too.
        keep_last: How many of the newest stay.
        keep_best: How many of the best stay, of those validated at their own step.
        keep_every_n_steps: Those at a multiple of this many steps stay for good; null: none.
        monitor: Validation metric that ranks them.
        mode: ``min`` or ``max``: which value of the metric is best.
        background: false: training waits until a checkpoint is written, and needs no memory for a copy.
    """

    def __init__(self, dirpath: str | Path | None = None, every_n_train_steps: int = 500, keep_last: int = 2,
                 keep_best: int = 1, keep_every_n_steps: int | None = None, monitor: str = "val/loss",
                 mode: str = "min", background: bool = True) -> None:
        if min([every_n_train_steps, keep_last, *{keep_every_n_steps} - {None}]) < 1 or keep_best < 0:
            raise ValueError(f"every_n_train_steps {every_n_train_steps}, keep_last {keep_last}, keep_every_n_steps "
                             f"{keep_every_n_steps}, keep_best {keep_best}: use at least 1, for keep_best at least 0.")
        super().__init__(dirpath, monitor=monitor, mode=mode, save_top_k=-1, every_n_train_steps=every_n_train_steps)
        self.keep_last, self.keep_best, self.keep_every = keep_last, keep_best, keep_every_n_steps
        self.io, self._pending, self._score, self._step = RunCheckpointIO(background), None, None, 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dirpath = trainer.strategy.broadcast(str(self.dirpath or Path(trainer.default_root_dir) / "checkpoints"))
        trainer.strategy.checkpoint_io = self.io

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_global_step_saved = self._step = trainer.global_step  # what it starts from is saved, or is step 0
        set_aside_later(trainer, Path(self.dirpath))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:  # it stands still during accumulation
            return
        self._step = trainer.global_step
        self.settle(trainer, wait=False)
        self.io.reserve(saved(trainer, pl_module))  # after a first step all of it is there
        if self._step % self._every_n_train_steps == 0:
            self.save(trainer, wait=WAIT)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        if trainer.world_size == 1:
            self.settle(trainer, wait=True)
        self.io.join(ENDING)  # several ranks may not all be here, so they cannot agree

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.settle(trainer, wait=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the score of the checkpoint saved at this step; saving comes before validation."""
        self.settle(trainer, wait=False)
        score = monitored(trainer.callback_metrics, self.monitor)
        if score is not None and self._last_global_step_saved == trainer.global_step:
            self._score = (trainer.global_step, score)
            if trainer.is_global_zero and self._pending is None and self._last_checkpoint_saved:
                self.score(score)

    def goes_on_from(self, path: Path) -> None:
        """A validation before the first step is one of this checkpoint."""
        self._last_global_step_saved, self._last_checkpoint_saved = step_of(path), str(path)

    def score(self, score: float) -> None:
        """Notes the score of the last checkpoint; the best ones may be others then. Rank 0 calls it."""
        note_score(Path(self._last_checkpoint_saved), score, self._prune)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the markers in the folder hold it all, so there is nothing to load

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def save(self, trainer: Trainer, wait: float | None = None) -> None:
        """Saves the state after the current optimizer step, unless it is saved; CheckpointError where it cannot be.

        All ranks call it, at a step's end. ``wait``: seconds to wait for the end of writing; null: until it is written.
        """
        step, begun = trainer.global_step, time.monotonic()
        self.settle(trainer, wait=True)
        if trainer.fast_dev_run or step == self._last_global_step_saved:
            return
        aside = Path(self.dirpath) / f"step={step:06d}.ckpt.partial"

        def snapshot() -> None:
            try:
                with self.io.deferred():
                    trainer.save_checkpoint(aside)
            except (OSError, RuntimeError):
                trainer.strategy.barrier()  # Lightning's after a save: there the others wait, or all have failed
                raise

        together(trainer, aside, lambda: trainer.is_global_zero and make_room(trainer, aside))
        together(trainer, aside, snapshot)
        self._last_global_step_saved, self._pending = step, aside
        self.io.begin(wait)
        self.settle(trainer, wait=wait is None)
        for logger in trainer.loggers:
            logger.log_metrics({"checkpoint/stall_s": time.monotonic() - begun}, step=step - 1)

    def settle(self, trainer: Trainer, wait: bool) -> None:
        """Publishes the checkpoint that is being written, when all ranks have written theirs. All ranks call it."""
        if self._pending is None or not (wait or trainer.strategy.reduce_boolean_decision(self.io.done())):
            return
        aside, self._pending = self._pending, None
        sums = [together(trainer, aside, self.io.finish)] * trainer.world_size
        if trainer.world_size > 1:
            distributed.all_gather_object(sums, sums[0])
        crc = {os.path.relpath(file, aside): value for rank in sums for file, value in rank.items()}
        together(trainer, aside, lambda: trainer.is_global_zero and self._publish(aside, crc))
        self._last_checkpoint_saved = self.last_model_path = str(aside.with_suffix(""))

    def _publish(self, aside: Path, crc: dict[str, int]) -> None:
        path, link = aside.with_suffix(""), aside.with_name("last.ckpt.partial")
        step, score = step_of(path), self._score or (None, None)
        publish(aside, path, {"step": step, "crc32": crc} | ({"score": score[1]} if score[0] == step else {}))
        remove(link)
        os.symlink(path.name, link)
        os.replace(link, path.with_name("last.ckpt"))
        self._prune()

    def _prune(self) -> None:
        best = prune(Path(self.dirpath), self.keep_last, self.keep_best, self.keep_every, self.mode)
        self.best_model_path = str(best[0]) if best else ""
