"""A copy in host memory of what a checkpoint will hold, so that training goes on while it is written."""

import copy
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class HostMemory:
    """Buffers of snapshots, kept from save to save: fresh memory costs more time than the copy.

    A buffer has a storage of its own, for `torch.save` writes storages whole; that of a tensor on a GPU is page-locked.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        self._lent: list[tuple[tuple[int, bool], Tensor]] = []
        self._reserving: threading.Thread | None = None

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Gets memory for copies of these, in a thread: the first snapshot of them finds it there."""
        sizes = [_kind(tensor) for tensor in tensors if tensor.numel()]
        device = torch.cuda.current_device() if any(pinned for _, pinned in sizes) else None  # a thread begins on GPU 0
        self._reserving = threading.Thread(target=self._reserve, args=(sizes, device))
        self._reserving.start()

    def _reserve(self, sizes: list[tuple[int, bool]], device: int | None) -> None:
        with nullcontext() if device is None else torch.cuda.device(device):
            try:
                for size, pinned in sizes:
                    if not threading.main_thread().is_alive():
                        return  # the process is ending, and waits for this thread: killed within it would be an abort
                    # Written to, it is there: a system hands out pages when they are first touched.
                    self._free[size, pinned].append(_fresh(size, pinned).zero_())
            except RuntimeError:
                pass  # none left: the snapshot will say so, where it is needed

    def take(self, tensor: Tensor) -> Tensor:
        """A contiguous buffer of this tensor's shape and type, lent until `give_back`."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        kind = _kind(tensor)
        buffer = self._free[kind].pop() if self._free[kind] else _fresh(*kind)
        self._lent.append((kind, buffer))
        return buffer.view(tensor.dtype).view(tensor.shape)

    @property
    def lent(self) -> int:
        """Bytes of the snapshots that are not written yet."""
        return sum(size for (size, _), _ in self._lent)

    def give_back(self) -> None:
        """Takes back what is lent: the snapshots in it are written."""
        for kind, buffer in reversed(self._lent):  # the next snapshot has each where this one had it
            self._free[kind].append(buffer)
        self._lent = []


def _kind(tensor: Tensor) -> tuple[int, bool]:
    """Bytes of its copy, and whether that is to be page-locked."""
    return tensor.numel() * tensor.element_size(), tensor.is_cuda


def _fresh(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


class Snapshot:
    """Copies nested containers with every tensor in host memory, tensors that are shared shared again."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory, self.seen = memory, {}

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.detach())
        if isinstance(value, dict):
            new = copy.copy(value)
            new.update((key, self.of(item)) for key, item in value.items())
            return new
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        return type(value)(map(self.of, value)) if type(value) in (list, tuple) else value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor.cpu()
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self.seen:
            self.seen[key] = self.memory.take(tensor).copy_(tensor, non_blocking=True)
        return self.seen[key]
