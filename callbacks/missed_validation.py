"""Makes up for a validation that was cut off: a checkpoint is saved before its step is validated."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from callbacks.checkpoint import RunCheckpoint
from callbacks.metrics_log import read_metrics
from vla_lm.checkpoint_files import complete_checkpoints, step_of


class MissedValidation(Callback):
    """A run that goes on from its newest checkpoint, whose step was to be validated and was not, validates first.

    Lightning would go on behind that validation: ``val/*`` would lack the step, and its checkpoint never be one of the
    best. A run whose last step was saved and not validated is validated too, though nothing is left to train. For runs
    that validate every so many steps (an integer ``val_check_interval``) and log into ``metrics.jsonl``.

    Args:
        checkpoint: what saves the run.
        metrics: the run's ``metrics.jsonl``, which says which steps are validated.
    """

    def __init__(self, checkpoint: RunCheckpoint, metrics: str | Path) -> None:
        self.checkpoint, self.metrics = checkpoint, Path(metrics)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        vars(loop).pop("run", None)  # of a fit that failed before it
        train = loop.run

        def run() -> None:
            del loop.run
            if self._is_due(trainer) and trainer.strategy.broadcast(trainer.is_global_zero and self._missed(trainer)):
                self._validate(trainer)
            train()

        # The checkpoint is restored between this hook and that call. Lightning has no hook in between, and no
        # on_train_start where nothing is left to train.
        loop.run = run

    def _is_due(self, trainer: Trainer) -> bool:
        step, interval = trainer.global_step, getattr(trainer, "val_check_interval", None)
        whole = isinstance(interval, int) and step * trainer.accumulate_grad_batches % interval == 0
        return whole and step > 0 and trainer.enable_validation and not trainer.fast_dev_run

    def _missed(self, trainer: Trainer) -> bool:
        """Whether the newest checkpoint is what the run goes on from and lacks its validation; it will be scored."""
        step, folder = trainer.global_step, Path(self.checkpoint.dirpath)
        markers = complete_checkpoints(folder) if folder.exists() else {}
        newest = next(reversed(markers), None)
        source = Path(trainer.ckpt_path or "")
        if newest is None or step_of(newest) != step or source.parent.resolve() != folder.resolve():
            return False
        self.checkpoint.goes_on_from(newest)
        found: dict[str, Any] = {}
        for line in read_metrics(self.metrics) if self.metrics.exists() else []:
            if line["step"] == step:
                found |= {name: value for name, value in line.items() if name.startswith("val/")}
        score = found.get(self.checkpoint.monitor)
        if score is not None and "score" not in markers[newest]:  # the run ended between the one and the other
            self.checkpoint.score(score)
        return not found

    def _validate(self, trainer: Trainer) -> None:
        rank_zero_info(f"step {trainer.global_step} was saved and not validated: validating it now")
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting, trainer.validating = False, True
        loop.run()
        loop._has_run, trainer.training = False, True  # else the epoch would count as validated, and so as ended
