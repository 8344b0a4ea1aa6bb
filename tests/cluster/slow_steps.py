"""A callback that gives a tiny run a pace: time for a signal to arrive."""

import time

from lightning.pytorch import Callback


class SlowSteps(Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *_) -> None:
        time.sleep(self.seconds)
