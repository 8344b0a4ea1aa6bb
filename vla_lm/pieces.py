"""How a model is built: in one piece, or sharded part by part, so that ZeRO-3 never holds it whole."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

PREFETCH = 50_000_000  # elements that ZeRO-3 gathers ahead (DeepSpeed's default)


def gathered_at_once(part: nn.Module, ahead: int) -> bool:
    """Whether ZeRO-3 gathers a part whole, and not each of its modules as it runs.

    A tenth of DeepSpeed's hooks is left then, which are what a small model waits for (README: up to 1.5 times the
    speed at 105M). A part of more than `ahead` elements would keep the GPU waiting instead: only so many are on their
    way beforehand.
    """
    return any(part.children()) and sum(p.numel() for p in part.parameters()) <= ahead


class OnePiece:
    """Leaves every part as it is."""

    def shard(self, part: nn.Module) -> nn.Module:
        """Take a part that has just been built, on the host, with all its modules."""
        return part

    def written(self, module: nn.Module) -> AbstractContextManager:
        """In it, the module's own parameters are whole and can be written; all ranks must write the same."""
        return nullcontext()


class ZeroPieces(OnePiece):
    """DeepSpeed's ZeRO-3: of each part a rank keeps its share.

    `deepspeed.zero.Init` around the building, as Lightning would have it, shards each module as it ends its `__init__`:
    what a model writes into its modules' weights after that is lost without a word, and the weights stay PyTorch's.

    Blocks of at most `zero_optimization.stage3_prefetch_bucket_size` elements are gathered whole (`gathered_at_once`).

    Args:
        config: DeepSpeed's.
        remote_device: where the shares lie, "cpu" or None (the GPU).
    """

    def __init__(self, config: dict[str, Any], remote_device: str | None) -> None:
        self.config, self.remote_device = config, remote_device

    def shard(self, part: nn.Module) -> nn.Module:
        import deepspeed

        ahead = self.config["zero_optimization"].get("stage3_prefetch_bucket_size", PREFETCH)
        deepspeed.utils.set_z3_leaf_module(part, gathered_at_once(part, int(ahead)))
        deepspeed.zero.Init(module=part, config_dict_or_path=self.config, remote_device=self.remote_device)
        return part

    def written(self, module: nn.Module) -> AbstractContextManager:
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0)
