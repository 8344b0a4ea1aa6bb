"""`python -m recipes.pretrain` with DeepSpeed on CPU processes, which Lightning and the recipe refuse."""

import threading

import torch
from deepspeed.utils import z3_leaf_module
from lightning.pytorch.accelerators import CPUAccelerator

from recipes.pretrain import main
from vla_lm import pieces, snapshot, strategy


def setup_environment(self) -> None:
    self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
    self.accelerator.setup_device(self.root_device)
    self.setup_distributed()


def fresh(size: int, pinned: bool, otherwise=snapshot._fresh) -> torch.Tensor:
    if threading.current_thread() is threading.main_thread():
        late.append(size)
    return otherwise(size, pinned)


def shard(self, part: torch.nn.Module, otherwise=pieces.ZeroPieces.shard) -> torch.nn.Module:
    whole.append(z3_leaf_module(otherwise(self, part)))
    return part


late: list[int] = []  # bytes of memory that was got during a save, not before it
whole: list[bool] = []  # of each part of a model that ZeRO-3 cut: it is gathered at once
snapshot._fresh = fresh
pieces.ZeroPieces.shard = shard
strategy.CUDAAccelerator = CPUAccelerator
strategy.ShardedStrategy.setup_environment = setup_environment

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    print(f"got during saves: {sum(late)} bytes; gathered at once: {sum(whole)} parts of {len(whole)}", flush=True)
