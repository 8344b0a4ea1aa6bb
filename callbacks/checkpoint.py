"""Saves a run so that a kill at any moment, or a full disk, leaves the older checkpoint usable."""

import os
import shutil
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from callbacks.checkpoint_files import beside, complete_checkpoints, publish, read_marker, remove, write_marker



class CheckpointError(OSError):
    """A checkpoint could not be written; the older ones are untouched."""


class RunCheckpoint(ModelCheckpoint):
    """Saves ``step=000500.ckpt`` every ``every_n_train_steps`` optimizer steps and at the end of training.

    The format is that of :mod:`callbacks.checkpoint_files`; ``last.ckpt`` is a link to the newest. A full disk raises
    :class:`CheckpointError` on all ranks and loses nothing. Checkpoints past the step a run starts from belong to an
    abandoned continuation and are set aside as ``….superseded``.

    Args:
        dirpath: Folder of the checkpoints; null: ``checkpoints`` in the trainer's ``default_root_dir``.
        every_n_train_steps: Optimizer steps from one checkpoint to the next; the end of training is saved too.
        keep_last: How many of the newest stay.
        keep_best: How many of the best stay, of those validated at their own step.
        monitor: Validation metric that ranks them.
        mode: ``min`` or ``max``: which value of the metric is best.
    """

    def __init__(
        self, dirpath: str | Path | None = None, every_n_train_steps: int = 500, keep_last: int = 2, keep_best: int = 1,
        monitor: str = "val/loss", mode: str = "min",
    ) -> None:  # fmt: skip
        if every_n_train_steps < 1 or keep_last < 1 or keep_best < 0:
            given = f"every_n_train_steps {every_n_train_steps}, keep_last {keep_last}, keep_best {keep_best}"
            raise ValueError(f"{given}: the first two must be at least 1, the last at least 0.")
        super().__init__(dirpath, monitor=monitor, mode=mode, save_top_k=-1, every_n_train_steps=every_n_train_steps)
        self.keep_last, self.keep_best = keep_last, keep_best

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dirpath = trainer.strategy.broadcast(str(self.dirpath or Path(trainer.default_root_dir) / "checkpoints"))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_global_step_saved = trainer.global_step  # what it starts from is saved already, or is step 0
        if trainer.is_global_zero:
            for path, marker in complete_checkpoints(self.dirpath).items():
                if marker["step"] > trainer.global_step:
                    superseded = beside(path, ".superseded")
                    rank_zero_warn(f"Training starts from step {trainer.global_step}: set aside as {superseded}")
                    beside(path, ".complete").unlink()
                    remove(superseded)
                    os.replace(path, superseded)
        trainer.strategy.barrier()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # global_step stands still during accumulation; save() passes over a step that is saved.
        if trainer.global_step % self._every_n_train_steps == 0:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the score of the checkpoint saved at this step; saving comes before validation."""
        score, path = trainer.callback_metrics.get(self.monitor), Path(self._last_checkpoint_saved)
        fresh = self._last_checkpoint_saved and self._last_global_step_saved == trainer.global_step
        if trainer.is_global_zero and fresh and score is not None and isfinite(score):
            write_marker(path, read_marker(path) | {"score": float(score)})
            self._prune()

    def state_dict(self) -> dict[str, Any]:
        return {}  # the markers in the folder hold it all, so there is nothing to load

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def save(self, trainer: Trainer) -> None:
        """Saves the state after the current optimizer step, unless it is saved; CheckpointError where it cannot be.

        All ranks call it, at a step's end.
        """
        step = trainer.global_step
        if trainer.fast_dev_run or step == self._last_global_step_saved:
            return
        path, aside = (Path(self.dirpath) / f"step={step:06d}.ckpt{ending}" for ending in ("", ".partial"))

        def write() -> None:
            try:
                trainer.save_checkpoint(aside)
            except (OSError, RuntimeError):
                trainer.strategy.barrier()  # the one at the end of save_checkpoint, where the other ranks wait
                raise

        def finish() -> None:
            publish(aside, path, step)
            link = path.with_name("last.ckpt.partial")
            remove(link)
            os.symlink(path.name, link)
            os.replace(link, path.with_name("last.ckpt"))
            self._prune()

        self._together(trainer, aside, lambda: trainer.is_global_zero and self._make_room(aside))
        self._together(trainer, aside, write)
        self._together(trainer, aside, lambda: trainer.is_global_zero and finish())
        self._last_global_step_saved, self._last_checkpoint_saved, self.last_model_path = step, str(path), str(path)

    def _together(self, trainer: Trainer, aside: Path, action: Callable[[], Any]) -> None:
        """Runs the action; when it fails on one rank, all ranks raise."""
        problem: Exception | None = None
        try:
            action()
        except (OSError, RuntimeError) as error:
            problem = error
        left = shutil.disk_usage(aside.parent).free if aside.parent.exists() else 0
        if not trainer.strategy.reduce_boolean_decision(problem is None):
            if trainer.is_global_zero:
                remove(aside)
            raise CheckpointError(
                f"Could not save {aside.with_suffix('')}: {problem or 'another rank failed'} ({left / 1e6:,.1f} MB "
                "were left on the disk). The older checkpoints there are untouched: free some space, then resume."
            ) from problem

    def _make_room(self, aside: Path) -> None:
        """Refuses before writing when the newest checkpoint's size does not fit again."""
        aside.parent.mkdir(parents=True, exist_ok=True)
        remove(aside)
        sizes = [marker["bytes"] for marker in complete_checkpoints(aside.parent).values()]
        if sizes and shutil.disk_usage(aside.parent).free < sizes[-1]:
            raise OSError(f"it needs about {sizes[-1] / 1e6:,.1f} MB")

    def _prune(self) -> None:
        found = complete_checkpoints(self.dirpath)
        scored = sorted((p for p in found if "score" in found[p]), key=lambda p: found[p]["score"])
        best = (scored if self.mode == "min" else scored[::-1])[: self.keep_best]
        for path in [p for p in list(found)[: -self.keep_last] if p not in best]:
            remove(path)
        for stray in Path(self.dirpath).glob("*.partial"):  # of a save that was killed
            remove(stray)
        self.best_model_path = str(best[0]) if best else ""
