"""Multi-query associative recall: how many of the queried values a model finds."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vla_lm.metrics import PredictionMetrics
from vla_lm.module import LanguageModel


@torch.inference_mode()
def evaluate(model: LanguageModel, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """Loss in nats per query, accuracy per query, exact_match (share of rows with every query right), queries, rows.

    Args:
        model: put into evaluation mode for the time of the call.
        batches: dictionaries with tokens and targets, int64 [B, T]; -100 where no query is.

    Raises:
        ValueError: no batch, or not one query in them.
    """
    metrics, training = PredictionMetrics().to(model.device), model.training
    model.eval()
    try:
        for batch in batches:
            metrics.update(model(batch["tokens"].to(model.device)).logits, batch["targets"].to(model.device))
    finally:
        model.train(training)
    if not metrics.targets:
        raise ValueError("nothing to evaluate: the batches hold no target; give at least one batch with queries")
    found = {name: float(value) for name, value in metrics.compute().items()}
    return found | {"queries": int(metrics.targets), "rows": int(metrics.rows)}
