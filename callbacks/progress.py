"""How far a run is: a bar on a terminal, a plain line now and then where there is none."""

import sys
from time import monotonic
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar

from callbacks.throughput import Throughput


def progress_bar(every_seconds: float = 30.0) -> ProgressBar:
    """The progress display that suits standard output: :class:`StepBar` on a terminal, else :class:`StepLines`."""
    return StepBar() if sys.stdout.isatty() else StepLines(every_seconds)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _numbers(trainer: Trainer) -> dict[str, str]:
    """Loss and tokens per second as last logged; reading the loss waits for the device."""
    numbers = {}
    for name, metric in (("loss", "train/loss"), ("val loss", "val/loss")):
        if metric in trainer.callback_metrics:
            numbers[name] = f"{trainer.callback_metrics[metric].item():.4f}"
    for callback in trainer.callbacks:
        if isinstance(callback, Throughput) and callback.latest:
            numbers["tokens/s"] = f"{callback.latest['tokens_per_second']:,.0f}"
    return numbers


class StepBar(RichProgressBar):
    """Lightning's rich bar, counting optimizer steps of the whole run rather than micro-batches of an epoch."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=5)
        self._shown: dict[str, str] = {}

    @property
    def total_train_batches(self) -> int | float:
        return self.trainer.max_steps if self.trainer.max_steps > 0 else super().total_train_batches

    def _get_train_description(self, current_epoch: int) -> str:
        return "Step"

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._update(self.train_progress_bar_id, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step if trainer.max_steps > 0 else batch_idx + 1
        super().on_train_batch_end(trainer, pl_module, outputs, batch, step - 1)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        if not self._shown or trainer.global_step % trainer.log_every_n_steps == 0:
            self._shown = _numbers(trainer)
        return self._shown


class StepLines(ProgressBar):
    """Prints ``step 500/3000, loss 2.1034, tokens/s 51,200, ETA 0:12:03`` every ``every_seconds`` seconds, after the
    first and the last step and, with the loss there, after a validation."""

    def __init__(self, every_seconds: float = 30.0) -> None:
        super().__init__()
        if every_seconds < 0:
            raise ValueError(f"every_seconds {every_seconds} must not be negative.")
        self.every_seconds = every_seconds
        self._enabled = True
        self._first: tuple[float, int] | None = None  # when the first step was over, and which it was

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._first, self._printed = None, 0.0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self._step or not trainer.is_global_zero:
            return
        self._step, now = trainer.global_step, monotonic()
        first, self._first = self._first is None, self._first or (now, self._step)
        if first or now - self._printed >= self.every_seconds or self._step == trainer.max_steps:
            self._printed = now
            self._line(trainer, now)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.is_global_zero and trainer.state.fn == "fit":
            self._printed = monotonic()
            self._line(trainer, self._printed, validated=True)

    def _line(self, trainer: Trainer, now: float, validated: bool = False) -> None:
        if not self._enabled:
            return
        numbers = _numbers(trainer)
        if not validated:
            numbers.pop("val loss", None)  # of an earlier step
        total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        parts = [f"step {trainer.global_step}{total}"]
        parts += [f"{name} {number}" for name, number in numbers.items()]
        if total and self._first and self._step > self._first[1]:
            pace = (now - self._first[0]) / (self._step - self._first[1])
            parts.append(f"ETA {_clock(pace * (trainer.max_steps - self._step))}")
        print(", ".join(parts), flush=True)
