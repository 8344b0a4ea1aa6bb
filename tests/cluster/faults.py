"""What goes wrong in a run under test, as callbacks and data that a command line can name; and a pace, to hit it."""

import os
import signal
import sys
import time
from pathlib import Path

from lightning.pytorch import Callback

import data.loader
from data.mqar import MQARDataModule

if "TEST_WORKER_TIMEOUT" in os.environ:
    data.loader.WORKER_TIMEOUT_S = float(os.environ["TEST_WORKER_TIMEOUT"])


class Pace(Callback):
    """Sleeps before every micro-batch, in a job's first start alone; the file `steps` says how many steps are done."""

    def __init__(self, seconds: float, steps: str | None = None) -> None:
        self.seconds, self.steps = seconds, steps

    def on_train_batch_start(self, trainer, *_) -> None:
        if self.steps and trainer.is_global_zero:
            Path(self.steps).write_text(str(trainer.global_step))
        if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
            time.sleep(self.seconds)


class Deed(Callback):
    """Does `deed` on one rank in a hook after `step` optimizer steps: raise, or the number of a signal to itself."""

    def __init__(self, deed: str, hook: str = "on_before_backward", step: int = 5, rank: int = 1) -> None:
        self.deed, self.step, self.rank, self.done = deed, step, rank, False
        setattr(self, hook, self._do)

    def _do(self, trainer, *_) -> None:
        if trainer.global_step != self.step or trainer.global_rank != self.rank or self.done:
            return
        self.done = True
        if self.deed == "raise":
            raise ValueError("a fault made for the test")
        os.kill(os.getpid(), signal.Signals[self.deed])


class StalledData(MQARDataModule):
    """Recall whose loader worker hangs in step `STEP`, on the last rank."""

    STEP = 7

    def train_set(self, plan):
        rows, first = super().train_set(plan), self.STEP * plan.rows_per_step
        if self.trainer.global_rank == self.trainer.world_size - 1:
            given = type(rows).__getitems__

            class Stalled(type(rows)):
                def __getitems__(self, indices):
                    if min(indices) >= first:
                        time.sleep(1000)
                    return given(self, indices)

            rows.__class__ = Stalled
        return rows


if __name__ == "__main__":
    sys.exit("named on a run's command line, not run by itself")
