"""All ranks compute with the same kernels."""

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from kernels.faulty_kinds import FAULTY


class SameKernels(Callback):
    """After the first optimizer step and the first validation, what failed its check on one rank is left on all.

    A rank checks the Triton kernels against PyTorch before their first use, the same numbers on every rank
    (`kernels.triton_check`); yet one GPU of many can be another model, or broken. Both ways are exact to
    rounding, so until then ranks differ by rounding alone.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trained = self._validated = False
        self._first = trainer.global_step + 1

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if not self._trained and trainer.global_step >= self._first:
            self._trained = True
            self._agree(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and not getattr(self, "_validated", True):
            self._validated = True
            self._agree(trainer)

    def _agree(self, trainer: Trainer) -> None:
        if trainer.world_size == 1:
            return
        found: list[set | None] = [None] * trainer.world_size
        dist.all_gather_object(found, FAULTY)
        apart = set.union(*found) - set.intersection(*found)
        FAULTY.update(apart)
        for kind in sorted(map(str, apart)):
            ranks = [rank for rank, kinds in enumerate(found) if kind in map(str, kinds)]
            rank_zero_warn(f"the Triton kernels failed their check on ranks {ranks} alone for {kind}: all ranks take "
                           "the PyTorch path for it from the next step on. See these ranks' logs")
