"""Sums over predicted tokens and rows, reduced over ranks; every ratio is taken once, of the total sums."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

IGNORED = -100


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats of each target, float32 [B, T]; 0 where the target is -100.

    Args:
        logits: [B, T, V], any floating type: the loss is computed in float32.
        targets: int64 [B, T].
    """
    if logits.shape[:-1] != targets.shape:
        shapes = f"logits {list(logits.shape)} do not fit targets {list(targets.shape)}"
        raise ValueError(f"{shapes}: pass [B, T, V] and [B, T]")
    flat = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view(targets.shape)


class PredictionMetrics(Metric):
    """Loss, accuracy, rows all right, and bits per byte where the bytes of the targets are known."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("nats", "correct", "targets", "rows_right", "rows", "byte_nats", "bytes"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor, target_bytes: Tensor | None = None) -> None:
        """Add a batch: logits [B, T, V], targets int64 [B, T] with -100 for none, target_bytes int64 [B, T]."""
        losses, valid = token_losses(logits, targets), targets != IGNORED
        right = (logits.argmax(-1) == targets) & valid
        answered = valid.any(1)
        self.nats += losses.sum(dtype=torch.float64)
        self.correct += right.sum()
        self.targets += valid.sum()
        self.rows_right += ((right | ~valid).all(1) & answered).sum()
        self.rows += answered.sum()
        if target_bytes is not None:
            # Every token's information counts, also that of tokens that stand for no byte (end of document).
            self.byte_nats += losses.sum(dtype=torch.float64)
            self.bytes += target_bytes.masked_fill(~valid, 0).sum()

    def compute(self) -> dict[str, Tensor]:
        """loss (nats per target), accuracy (share of targets), exact_match (share of rows); bits_per_byte if known.

        Empty where nothing was predicted.
        """
        if not self.targets:
            return {}
        out = {
            "loss": self.nats / self.targets,
            "accuracy": self.correct / self.targets,
            "exact_match": self.rows_right / self.rows,
        }
        if self.bytes:
            out["bits_per_byte"] = self.byte_nats / self.bytes / math.log(2)
        return out
