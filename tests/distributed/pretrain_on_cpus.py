"""`python -m recipes.pretrain` with DeepSpeed on CPU processes, which Lightning and the recipe refuse."""

import torch
from lightning.pytorch.accelerators import CPUAccelerator

from recipes.pretrain import main
from vla_lm import strategy


def setup_environment(self) -> None:
    self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
    self.accelerator.setup_device(self.root_device)
    self.setup_distributed()


strategy.CUDAAccelerator = CPUAccelerator
strategy.ShardedStrategy.setup_environment = setup_environment

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
