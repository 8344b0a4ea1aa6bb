"""What a rank's parameters, masters, gradients, optimizer states and buckets really are: dtypes and bytes.

Read from the tensors themselves, alike under plain, DDP and DeepSpeed training.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from callbacks.gradients import owned_gradients

# Where DeepSpeed's optimizers keep their float32 copies of the weights, ZeRO-1 and 2, ZeRO-3 and ZeRO-1 of bfloat16.
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")


Sizes = dict[torch.dtype, int]  # bytes of each type


def allocated(trainer: Trainer, module: LightningModule, gradients: bool = False) -> dict[str, Sizes]:
    """Part -> dtype -> bytes on this rank, host and device together. A storage counts whole, with padding, and once.

    Parts: "parameters" (under ZeRO-3 this rank's piece), "gathered" (ZeRO-3's whole ones of this moment), "masters"
    (none where the parameters are their own), "optimizer states" (step counters aside; none before the first step),
    "buckets" (DeepSpeed's or DDP's, for gradients on their way; none under DDP's gradient_as_bucket_view, where the
    gradients lie in them and count as gradients) and, where asked for, "gradients": only between the last backward pass
    and the update, see `gradients.at_step_boundary`.
    """
    wrapper, seen = trainer.optimizers[0], set()
    buckets = [bucket.buffer for bucket in getattr(wrapper, "ipg_buckets", {}).values()]
    parts = {
        "parameters": _parameters(module),
        "gathered": (p for p in module.parameters() if hasattr(p, "ds_tensor")),
        "masters": _masters(wrapper),
        "optimizer states": _states(wrapper),
        "buckets": (piece for bucket in buckets for piece in (bucket if isinstance(bucket, list) else [bucket])),
        "gradients": _gradients(wrapper, module) if gradients else (),
    }
    found = {part: _sizes(tensors, seen) for part, tensors in parts.items()}
    found["buckets"] |= _ddp_buckets(trainer.strategy.model)
    return found


def saved(trainer: Trainer, module: LightningModule) -> Iterator[Tensor]:
    """What this rank writes into a checkpoint, from the first step on; but for small things.

    What it would first gather from other ranks, the states that documents carry, is a tensor without memory.
    """
    wrapper = trainer.optimizers[0]
    if trainer.is_global_zero and not hasattr(next(module.parameters()), "ds_tensor"):  # else they are in the masters
        yield from _parameters(module)
    sharded = hasattr(wrapper, "optimizer")
    if trainer.is_global_zero or sharded:
        yield from _masters(wrapper)
        yield from _states(wrapper)
        lanes = module.lanes.own() if hasattr(module, "lanes") else {}
        for tensor in (tensor for layer in lanes.get("layers", []) for tensor in layer.values()):
            alone = sharded or trainer.world_size == 1
            yield tensor if alone else tensor.to("meta").repeat(trainer.world_size, *[1] * (tensor.ndim - 1))


def _parameters(module: LightningModule) -> Iterator[Tensor]:
    return (getattr(p, "ds_tensor", p) for p in module.parameters())


def _masters(wrapper: Any) -> Iterable[Tensor]:
    return next((getattr(wrapper, name) for name in _MASTERS if hasattr(wrapper, name)), [])


def _states(wrapper: Any) -> Iterator[Tensor]:
    inner = getattr(wrapper, "optimizer", wrapper)  # DeepSpeed wraps torch's
    states = (value for state in inner.state.values() for value in state.values())
    return (value for value in states if isinstance(value, Tensor) and value.ndim > 0)


def _ddp_buckets(model: Any) -> Sizes:
    # DDP hands out no bucket; their bytes are in what it logs, by the bucket and not by type.
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return {}
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    return {dtype: sum(map(int, model._get_ddp_logging_data()["bucket_sizes"].split(",")))}


def _gradients(wrapper: Any, module: LightningModule) -> Iterable[Tensor]:
    yield from owned_gradients(module)[0].values()
    yield from (p.grad for p in module.parameters() if p.grad is not None)


def _sizes(tensors: Iterable[Tensor | None], seen: set[int]) -> Sizes:
    sizes: Sizes = {}
    for tensor in tensors:
        if tensor is None or tensor.untyped_storage().nbytes() == 0:
            continue
        place = tensor.untyped_storage().data_ptr()
        if place not in seen:
            seen.add(place)
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.untyped_storage().nbytes()
    return sizes


def communicated(trainer: Trainer, module: LightningModule) -> set[torch.dtype]:
    """The types in which gradients are summed over the ranks; empty on one rank."""
    if trainer.world_size == 1:
        return set()
    wrapper = trainer.optimizers[0]
    if hasattr(wrapper, "ipg_buckets"):
        return set(wrapper.ipg_buckets)
    if hasattr(wrapper, "grad_acc_dtype"):  # DeepSpeed's optimizer for ZeRO-1 of bfloat16
        return {wrapper.grad_acc_dtype}
    return {p.dtype for p in module.parameters() if p.requires_grad}  # DDP's buckets
