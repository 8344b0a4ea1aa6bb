"""Stops a run before a non-finite loss or gradient reaches the weights."""

from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from callbacks.checkpoint import RunCheckpoint
from callbacks.gradients import at_step_boundary, layer_of, norm_dtype, owned_gradients
from callbacks.together import CheckpointError
from vla_lm.checkpoint_files import newest_complete


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite. The weights are still those of the step before.

    Attributes:
        step: number (from 1) of the optimizer step that was not taken.
        layer: the layer nearest to the loss whose gradient is not finite; None when only the loss is.
    """

    def __init__(self, message: str, step: int, layer: str | None) -> None:
        super().__init__(message)
        self.step, self.layer = step, layer


class FiniteGuard(Callback):
    """Checks every loss and every gradient once per optimizer step, before clipping and before the update.

    All ranks decide together (one small collective, one host sync per optimizer step) and raise
    :class:`NonFiniteError` together, which names the step, the rank, the layer and parameter, and the newest
    checkpoint that can be resumed. Under DeepSpeed it acts before ``engine.step``, which would skip such a step
    silently.
    """

    def __init__(self) -> None:
        self._bad_loss: Tensor | None = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        bad = ~torch.isfinite(loss.detach())
        self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not at_step_boundary(trainer):
            return
        gradients, _ = owned_gradients(pl_module)
        bad_loss, self._bad_loss = self._bad_loss, None
        verdict = bad_loss.to(pl_module.device, torch.float32)
        if gradients:
            # A norm is finite exactly when every entry is finite and their squares do not overflow float32.
            norms = torch._foreach_norm(list(gradients.values()), 2, dtype=norm_dtype(gradients))
            total = torch.stack([norm.to(pl_module.device) for norm in norms])
            verdict = verdict + (~torch.isfinite(total)).sum()
        verdict = trainer.strategy.reduce(verdict, reduce_op="sum")
        if verdict.item() > 0:
            self._stop(trainer, bool(bad_loss), gradients, [name for name, _ in pl_module.named_parameters()])

    def _stop(self, trainer: Trainer, bad_loss: bool, gradients: dict[str, Tensor], order: list[str]) -> None:
        mine = (bad_loss, [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()])
        ranks: list[Any] = [mine]
        if trainer.world_size > 1:
            ranks = [None] * trainer.world_size
            torch.distributed.all_gather_object(ranks, mine)
        losses = [rank for rank, (bad, _) in enumerate(ranks) if bad]
        # Backward runs from the loss to the embedding: the last one in the order of definition was met first.
        names = sorted({name for _, bad in ranks for name in bad}, key=order.index)
        layer = layer_of(names[-1]) if names else None

        step = trainer.global_step + 1
        parts = []
        if losses:
            parts.append(f"the loss is not finite on rank {', '.join(map(str, losses))}")
        if names:
            parts.append(
                f"the gradient is not finite in {len(names)} of {len(order)} parameters, nearest to the loss "
                f"{names[-1]} (layer {layer})"
            )
        elif not losses:
            parts.append("the squared gradient norm overflows float32")
        for checkpoint in trainer.checkpoint_callbacks:
            if isinstance(checkpoint, RunCheckpoint):
                with suppress(CheckpointError):  # all ranks are here: what is being written is a good one
                    checkpoint.settle(trainer, wait=True)
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        good = newest_complete(folder) if folder else None
        raise NonFiniteError(
            f"Stopped at optimizer step {step} before the update: {' and '.join(parts)}. The weights are unchanged. "
            + (f"Last good checkpoint: {good}. Resume from it with a smaller trainer.gradient_clip_val, or start"
               if good else "No checkpoint had been saved yet. Start")
            + " a new run with a lower learning rate or more warm-up, or look at the batch of this step.",
            step,
            layer,
        )
