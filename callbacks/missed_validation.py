"""Makes up for a validation that was cut off: a checkpoint is saved before its step is validated."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from callbacks.metrics_log import METRICS, read_metrics


class MissedValidation(Callback):
    """Where a run goes on from its own checkpoint, whose step was to be validated and was not, that comes first.

    Lightning would go on behind that validation: ``val/*`` would lack the step, and its checkpoint never be one of the
    best. A run whose last step was saved and not validated is validated too, though nothing is left to train.

    Args:
        run_dir: the run's folder; its ``metrics.jsonl`` says which steps are validated.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop, train = trainer.fit_loop, trainer.fit_loop.run

        def run() -> None:
            del loop.run
            if self._missed(trainer):
                self._validate(trainer)
            train()

        # The checkpoint is restored between this hook and that call. Lightning has none in between, and no
        # on_train_start where nothing is left to train.
        loop.run = run

    def _missed(self, trainer: Trainer) -> bool:
        step, source = trainer.global_step, trainer.ckpt_path
        due = step > 0 and step * trainer.accumulate_grad_batches % trainer.val_check_interval == 0
        if source is None or not (due and trainer.enable_validation):
            return False
        own = Path(source).resolve().parent == (self.run_dir / "checkpoints").resolve()
        return trainer.strategy.broadcast(own and not self._validated(step))

    def _validated(self, step: int) -> bool:
        log = self.run_dir / METRICS
        lines = read_metrics(log) if log.exists() else []
        return any(line["step"] == step and any(name.startswith("val/") for name in line) for line in lines)

    def _validate(self, trainer: Trainer) -> None:
        rank_zero_info(f"step {trainer.global_step} was saved and not validated: validating it now")
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting, trainer.validating = False, True
        loop.run()
        trainer.training = True
