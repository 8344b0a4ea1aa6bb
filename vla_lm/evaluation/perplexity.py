"""Loss on text, in bits per byte and by position in the document."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vla_lm.metrics import IGNORED, token_losses
from vla_lm.module import LanguageModel
from vla_lm.state import Packing


@torch.inference_mode()
def evaluate(
    model: LanguageModel,
    batches: Iterable[dict[str, Tensor]],
    buckets: Sequence[int] = (64, 256, 1024, 4096, 16384),
) -> dict:
    """Loss of packed documents, as a whole and by position.

    Args:
        model: put into evaluation mode for the time of the call.
        batches: dictionaries with tokens, targets, target_bytes, int64 [B, T], and cu_seqlens, int64 [N + 1].
        buckets: rising upper bounds (exclusive) of the position in the document; a last bucket takes the rest.

    Returns:
        loss (nats per target), perplexity, bits_per_byte, targets, bytes, rows, and by_position: the same but rows,
        with start and end (exclusive; the last bucket's is the longest document's), for each bucket whose targets
        have bytes.

    Raises:
        ValueError: buckets that do not rise, or nothing to evaluate.
    """
    bounds = list(buckets)
    if not bounds or bounds[0] < 1 or any(b <= a for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"buckets are {bounds}: give rising positions above 0, such as 64 256 1024")
    device, training, count = model.device, model.training, 0
    edges = torch.tensor(bounds, device=device)
    sums = torch.zeros(3, len(bounds) + 1, dtype=torch.float64, device=device)  # nats, targets, bytes
    longest = torch.zeros((), dtype=torch.int64, device=device)
    model.eval()
    try:
        for batch in batches:
            count += len(batch["tokens"])
            targets, sizes = batch["targets"].to(device), batch["target_bytes"].to(device).flatten()
            valid = (targets != IGNORED).flatten()
            nats = token_losses(model(batch["tokens"].to(device), batch["cu_seqlens"]).logits, targets).flatten()
            position = Packing.build(batch["cu_seqlens"], *targets.shape, device).position
            longest = torch.maximum(longest, position.max() + 1)
            bucket = torch.bucketize(position, edges, right=True)
            for row, values in zip(sums, (nats, valid, sizes)):
                row.index_add_(0, bucket[valid], values[valid].double())
    finally:
        model.train(training)
    rows = sums.T.tolist()
    total = [sum(column) for column in zip(*rows)]
    if not total[1] or not total[2]:
        raise ValueError("nothing to evaluate: the batches hold no target with bytes; give a batch of documents")
    spans = zip([0, *bounds], [*bounds, int(longest)], rows)
    by_position = [
        {"start": start, "end": min(end, int(longest))} | _measures(*row) for start, end, row in spans if row[2]
    ]
    return _measures(*total) | {"rows": count, "by_position": by_position}


def _measures(nats: float, targets: float, text_bytes: float) -> dict:
    return {
        "loss": nats / targets,
        "perplexity": math.exp(min(nats / targets, 700)),
        "bits_per_byte": nats / text_bytes / math.log(2),
        "targets": int(targets),
        "bytes": int(text_bytes),
    }
