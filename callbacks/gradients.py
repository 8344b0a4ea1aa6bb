"""Gradients as they stand just before the optimizer step, read alike under plain, DDP and DeepSpeed training."""

import re
from functools import lru_cache

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

_LAYER = re.compile(r"(?:^|\.)((?:layers|blocks)\.\d+)\.")


def at_step_boundary(trainer: Trainer) -> bool:
    """Whether the micro-batch whose backward just ended completes an optimizer step.

    For use in ``on_before_optimizer_step``, which Lightning calls once per optimizer step, except under DeepSpeed,
    where it comes with every micro-batch.
    """
    engine = trainer.strategy.model
    return not hasattr(engine, "is_gradient_accumulation_boundary") or engine.is_gradient_accumulation_boundary()


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: ``transformer.layers.0.mixer.q.weight`` -> ``layers.0``, and for a parameter
    outside the layers the module that holds it: ``transformer.embedding.weight`` -> ``embedding``."""
    found = _LAYER.search(name)
    return found.group(1) if found else name.rsplit(".", 2)[-2] if "." in name else name


def owned_gradients(module: LightningModule) -> tuple[dict[str, Tensor], bool]:
    """The gradient pieces this rank holds at a step boundary, before clipping.

    Returns:
        (gradients, sharded): parameter name -> gradient. Not sharded: each is the whole gradient, equal on every
        rank. Sharded (ZeRO 1, 2, 3): disjoint flat pieces whose union over the ranks is the whole gradient; a rank
        may hold none of a parameter.
    """
    gradients, sharded = {}, False
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):  # ZeRO-3
            sharded = True
            gradients[name] = parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter)
        elif hasattr(parameter, "_hp_mapping"):  # ZeRO-1, ZeRO-2 and DeepSpeed's bf16 optimizer
            sharded = True
            if (mapping := parameter._hp_mapping) is not None:
                piece = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
                address = mapping.lp_fragment_address
                if piece.numel() != address.numel:  # the bf16 optimizer keeps the whole gradient on every rank
                    piece = piece.narrow(0, address.start, address.numel)
                gradients[name] = piece
        elif parameter.grad is not None:
            gradients[name] = parameter.grad
    return gradients, sharded


def norm_dtype(gradients: dict[str, Tensor]) -> torch.dtype:
    """What norms are computed in: float32, or float64 where a gradient is of that type."""
    return torch.float64 if any(g.dtype == torch.float64 for g in gradients.values()) else torch.float32


def layer_squares(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Squared gradient norm of each layer over all ranks: layer name -> float32 scalar, without a host sync.

    Every rank must call it (one collective when the gradients are sharded).
    """
    gradients, sharded = owned_gradients(module)
    layers = list(dict.fromkeys(layer_of(name) for name, p in module.named_parameters() if p.requires_grad))
    squares = torch.zeros(len(layers), dtype=torch.float32, device=module.device)
    if gradients:
        norms = torch._foreach_norm(list(gradients.values()), 2, dtype=norm_dtype(gradients))
        owner = _index(tuple(layers.index(layer_of(name)) for name in gradients), module.device)
        squares.index_add_(0, owner, torch.stack([norm.to(module.device) for norm in norms]).square().float())
    if sharded:
        squares = trainer.strategy.reduce(squares, reduce_op="sum")
    return dict(zip(layers, squares.unbind()))


@lru_cache(maxsize=4)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(places, device=device)  # once a run: the copy waits for the device
