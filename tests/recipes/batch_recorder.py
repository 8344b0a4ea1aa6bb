"""Callbacks for the resume tests: which tokens each optimizer step was trained on; an end amid a validation."""

import hashlib
import os
import signal

from lightning.pytorch import Callback


class BatchRecorder(Callback):
    """Appends "step hash" to `path` for every micro-batch, before it is trained."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        digest = hashlib.sha1(batch["tokens"].cpu().numpy().tobytes()).hexdigest()
        with open(self.path, "a") as file:
            file.write(f"{trainer.global_step} {batch_idx} {digest}\n")


class KilledInValidation(Callback):
    """SIGKILL at the first batch of the validation after `step` optimizer steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGKILL)
