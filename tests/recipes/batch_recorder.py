"""A callback for the resume tests: which tokens each optimizer step was trained on."""

import hashlib

from lightning.pytorch import Callback


class BatchRecorder(Callback):
    """Appends "step hash" to `path` for every micro-batch, before it is trained."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        digest = hashlib.sha1(batch["tokens"].cpu().numpy().tobytes()).hexdigest()
        with open(self.path, "a") as file:
            file.write(f"{trainer.global_step} {batch_idx} {digest}\n")
