"""`python -m recipes.pretrain` with DeepSpeed on CPU processes, which Lightning and the recipe refuse."""

import threading

import torch
from lightning.pytorch.accelerators import CPUAccelerator

from recipes.pretrain import main
from vla_lm import snapshot, strategy


def setup_environment(self) -> None:
    self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
    self.accelerator.setup_device(self.root_device)
    self.setup_distributed()


def fresh(size: int, pinned: bool, otherwise=snapshot._fresh) -> torch.Tensor:
    if threading.current_thread() is threading.main_thread():
        late.append(size)
    return otherwise(size, pinned)


late: list[int] = []  # bytes of memory that was got during a save, not before it
snapshot._fresh = fresh
strategy.CUDAAccelerator = CPUAccelerator
strategy.ShardedStrategy.setup_environment = setup_environment

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    print(f"got during saves: {sum(late)} bytes", flush=True)
