"""Gradient norms per layer and in all, before clipping, and how often clipping acts."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from callbacks.gradients import at_step_boundary, layer_squares


class GradientNorms(Callback):
    """Logs ``gradient_norm/layers.0``, …, ``gradient_norm/global`` and ``gradient_norm/clip_rate``.

    The norms are those of the whole step's gradient (all ranks, all micro-batches) before clipping, the same numbers
    one process would see, also under DeepSpeed. The clip rate is the share of optimizer steps since the last logging
    in which the global norm exceeded ``gradient_clip_val``. Logged every ``log_every_n_steps`` optimizer steps; in
    between the numbers stay on the device.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._clipped: torch.Tensor | None = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not at_step_boundary(trainer):
            return
        squares = layer_squares(trainer, pl_module)
        total = torch.stack(list(squares.values())).sum().sqrt()
        self._steps += 1
        if trainer.gradient_clip_val:
            exceeded = (total > trainer.gradient_clip_val).float()
            self._clipped = exceeded if self._clipped is None else self._clipped + exceeded
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            metrics = {f"gradient_norm/{layer}": square.sqrt() for layer, square in squares.items()}
            metrics["gradient_norm/global"] = total
            if self._clipped is not None:
                metrics["gradient_norm/clip_rate"] = self._clipped / self._steps
            pl_module.log_dict(metrics, on_step=True, on_epoch=False)
            self._steps, self._clipped = 0, None
