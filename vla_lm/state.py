"""What a layer carries from one stretch of a document to the next, and where packed documents lie in a row."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Documents laid end to end in rows: which document each token belongs to, and where in it."""

    cu_seqlens: Tensor
    """Document boundaries over the flattened rows, int64 [N + 1], from 0 to B * T; every row start is among them."""
    host: Tensor
    """The same on the host, where the operator reads it."""
    row_length: int
    """Tokens per row: no document is longer."""
    document: Tensor
    """Index of each token's document, int64 [B * T]."""
    position: Tensor
    """Index of each token in its document's stretch, int64 [B * T]."""

    @classmethod
    def build(cls, cu_seqlens: Tensor, rows: int, row_length: int, device: torch.device) -> "Packing":
        """Packing of `rows` rows on `device`. Boundaries given on the host cost no synchronisation.

        Raises:
            ValueError: not a vector of integers that rises from 0 to the number of tokens, or a document crosses a row.
        """
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2:
            raise ValueError(
                f"cu_seqlens has shape {list(cu_seqlens.shape)} and type {cu_seqlens.dtype}: "
                "pass the document boundaries as a vector of integers from 0 to the number of tokens"
            )
        host = cu_seqlens.long().cpu()
        if host[0] != 0 or host[-1] != rows * row_length or (host.diff() < 1).any():
            raise ValueError(
                f"cu_seqlens runs from {int(host[0])} to {int(host[-1])} with documents of {int(host.diff().min())} "
                f"tokens or more: it must rise from 0 to the {rows * row_length} tokens"
            )
        crossed = ~torch.isin(torch.arange(rows) * row_length, host)
        if crossed.any():
            start = int(crossed.nonzero()[0]) * row_length
            raise ValueError(f"cu_seqlens has no boundary at {start}, where a row of {row_length} begins: add it")
        bounds = host.to(device, non_blocking=True)
        index = torch.arange(rows * row_length, device=device)
        document = torch.searchsorted(bounds, index, right=True) - 1
        return cls(bounds, host, row_length, document, index - bounds[document])

    @property
    def documents(self) -> int:
        """Number of documents N."""
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each document, int64 [N]."""
        return self.cu_seqlens.diff()


@dataclass(frozen=True)
class LayerState:
    """State of one layer for N documents. Every tensor has the documents as first dimension."""

    memory: Any
    """Operator state (`kernels.State`: S, A, z), None under softmax attention."""
    tail: Tensor | None
    """Last conv_width - 1 inputs of the convolution, [N, W - 1, 3 * d_model]; None without a convolution."""
    length: Tensor
    """Tokens seen so far, int64 [N]."""
    keys: Tensor | None = None
    """Softmax attention only: keys so far, [N, L, H, D]."""
    values: Tensor | None = None
    """Softmax attention only: values so far, [N, L, H, D]."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "LayerState":
        """The state with `function` applied to every tensor."""
        return map_tensors(self, function)

    def detach(self) -> "LayerState":
        """Cut from the graph."""
        return self.map(Tensor.detach)

    def index_select(self, index: Tensor) -> "LayerState":
        """States of the documents `index`, int64 [M]."""
        return self.map(lambda tensor: tensor.index_select(0, index))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by dotted name (memory.S, tail, length, ...), for checkpoints."""
        return dict(_named_tensors(self))


def map_tensors(value, function: Callable[[Tensor], Tensor]):
    """Apply `function` to every tensor of a dataclass of tensors, None, and such dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if not is_dataclass(value):
        return value
    return replace(value, **{field.name: map_tensors(getattr(value, field.name), function) for field in fields(value)})


def where_documents(mask: Tensor, yes, no):
    """Per document, `yes` where `mask` (bool [N]) else `no`: tensors [N, ...] or dataclasses of them; None is 0."""
    if isinstance(yes, Tensor) or isinstance(no, Tensor):
        yes = torch.zeros_like(no) if yes is None else yes
        no = torch.zeros_like(yes) if no is None else no
        return torch.where(mask.view(-1, *[1] * (yes.ndim - 1)), yes, no)
    if not is_dataclass(yes):
        return yes
    return replace(
        yes,
        **{f.name: where_documents(mask, getattr(yes, f.name), getattr(no, f.name)) for f in fields(yes)},
    )


def _named_tensors(value, prefix: str = ""):
    if isinstance(value, Tensor):
        yield prefix, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _named_tensors(getattr(value, field.name), f"{prefix}.{field.name}" if prefix else field.name)
