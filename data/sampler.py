"""From one global sample counter to batches: the same samples at any number of ranks, workers and resumes.

Training is an endless numbered list of samples. Optimizer step `s` trains samples `[s*R, (s+1)*R)`, `R` rows per step;
micro-batch `m` of rank `r` takes the contiguous rows `s*R + m*(world*micro_rows) + r*micro_rows + [0, micro_rows)`.
Nothing else is remembered, so a restored `global_step` restores the data exactly, at another world size too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from data.loader import ResumableLoader


@dataclass(frozen=True)
class BatchPlan:
    """How an optimizer step's rows are cut.

    rows_per_step: rows of the whole optimizer step, over all ranks and micro-batches.
    micro_rows: rows of one micro-batch on one rank.
    accumulation: micro-batches a rank sums into one optimizer step.
    """

    rows_per_step: int
    micro_rows: int
    accumulation: int


def plan_batches(global_batch_tokens: int, row_tokens: int, micro_batch_rows: int | None, world_size: int) -> BatchPlan:
    """Derive the accumulation from the global batch in tokens. Raises ValueError where it does not divide evenly."""
    if row_tokens < 1 or world_size < 1 or global_batch_tokens < 1:
        raise ValueError(
            f"global_batch_tokens ({global_batch_tokens}), row length ({row_tokens}) and world size ({world_size}) "
            "must be at least 1"
        )
    rows, rest = divmod(global_batch_tokens, row_tokens)
    if rest:
        raise ValueError(
            f"global_batch_tokens {global_batch_tokens} is not a whole number of rows of {row_tokens} tokens: "
            f"set it to {f'{rows * row_tokens} or ' if rows else ''}{(rows + 1) * row_tokens}"
        )
    if micro_batch_rows is None:
        if rows % world_size:
            up = -(-rows // world_size) * world_size
            raise ValueError(
                f"{rows} rows per optimizer step ({global_batch_tokens} tokens / {row_tokens}) cannot be shared "
                f"evenly by {world_size} ranks: "
                f"set global_batch_tokens to {up * row_tokens} ({up} rows), or run on a number of ranks that divides "
                f"{rows}"
            )
        return BatchPlan(rows, rows // world_size, 1)
    if micro_batch_rows < 1:
        raise ValueError(f"micro_batch_rows must be at least 1 (or null for all rows at once), got {micro_batch_rows}")
    together = micro_batch_rows * world_size
    if rows % together:
        fits = [m for m in range(1, rows + 1) if rows % (m * world_size) == 0]
        mend = f"set micro_batch_rows to one of {fits[-8:]}" if fits else "change the number of ranks"
        up = -(-rows // together) * together
        raise ValueError(
            f"{rows} rows per optimizer step ({global_batch_tokens} tokens / {row_tokens}) are not a multiple of "
            f"micro_batch_rows {micro_batch_rows} "
            f"x {world_size} ranks: {mend}, or global_batch_tokens to {up * row_tokens} ({up} rows)"
        )
    return BatchPlan(rows, micro_batch_rows, rows // together)


class GlobalBatchSampler(Sampler[list[int]]):
    """One rank's micro-batches of a whole run, as lists of global sample indices.

    `len()` is the whole run's number of micro-batches, which is what the trainer's restored batch counters expect;
    iteration starts at the step that `current_step()` returns when iteration begins.
    """

    def __init__(
        self, plan: BatchPlan, world_size: int, rank: int, max_steps: int, current_step: Callable[[], int]
    ) -> None:
        self.plan, self.world_size, self.rank = plan, world_size, rank
        self.max_steps, self.current_step = max_steps, current_step
        self.batch_size = plan.micro_rows  # read by the DeepSpeed strategy

    def __len__(self) -> int:
        return self.max_steps * self.plan.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan
        for step in range(self.current_step(), self.max_steps):
            for micro in range(plan.accumulation):
                first = step * plan.rows_per_step + (micro * self.world_size + self.rank) * plan.micro_rows
                yield list(range(first, first + plan.micro_rows))


class RowBatches(Sampler[list[int]]):
    """A validation set's rows in order, in batches of `batch_rows`, shared by the ranks.

    Where the rows divide evenly each rank reads its own contiguous share; otherwise every rank reads all of them.
    Either way each rank runs the same number of batches, and a sum/count mean over ranks weighs every row alike.
    """

    def __init__(self, rows: int, batch_rows: int, world_size: int, rank: int) -> None:
        share = rows // world_size if rows % world_size == 0 else rows
        self.first = rank * share if rows % world_size == 0 else 0
        self.last, self.batch_rows = self.first + share, batch_rows

    def __len__(self) -> int:
        return -(-(self.last - self.first) // self.batch_rows)

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.first, self.last, self.batch_rows):
            yield list(range(first, min(first + self.batch_rows, self.last)))


class SampledDataModule(pl.LightningDataModule):
    """Base of the data modules: batch plan, loaders, and a state that is checked on resume.

    A subclass sets `row_tokens`, `val_names`, `longest_sequence` and `fingerprint` in its constructor or `setup`, and
    gives `train_set(plan)` and `val_sets()`: map-style data sets whose `__getitems__(indices)` returns one finished
    batch for ascending row indices.
    """

    row_tokens: int
    val_names: list[str]
    fingerprint: str
    longest_sequence: int

    def __init__(
        self, global_batch_tokens: int, micro_batch_rows: int | None, val_batch_rows: int, num_workers: int, seed: int
    ) -> None:
        super().__init__()
        if num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, got {num_workers}")
        if val_batch_rows < 1:
            raise ValueError(f"val_batch_rows must be at least 1, got {val_batch_rows}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"the data seed must be in [0, 2**63), got {seed}")
        self.global_batch_tokens, self.micro_batch_rows = global_batch_tokens, micro_batch_rows
        self.val_batch_rows, self.num_workers, self.seed = val_batch_rows, num_workers, seed

    def train_set(self, plan: BatchPlan) -> Dataset:
        raise TypeError(f"{type(self).__name__} must define train_set")

    def val_sets(self) -> list[Dataset]:
        raise TypeError(f"{type(self).__name__} must define val_sets")

    @property
    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer is not None else (1, 0)

    def batch_plan(self, world_size: int) -> BatchPlan:
        """The plan at this world size; ValueError naming the mend where the global batch cannot be shared evenly."""
        return plan_batches(self.global_batch_tokens, self.row_tokens, self.micro_batch_rows, world_size)

    def setup(self, stage: str | None = None) -> None:
        if stage == "fit" and self.trainer is not None:
            self.trainer.accumulate_grad_batches = self.batch_plan(self.trainer.world_size).accumulation

    def _loader(self, rows: Dataset, batches: Sampler) -> DataLoader:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return ResumableLoader(rows, batches, self.num_workers, pin_memory=on_gpu)

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        if trainer is None or trainer.max_steps < 1:
            raise ValueError(
                "the training data is endless: attach a trainer with max_steps >= 1 (trainer.max_steps sets the "
                "run's length)"
            )
        world_size, rank = self._ranks
        plan = self.batch_plan(world_size)
        return self._loader(
            self.train_set(plan),
            GlobalBatchSampler(plan, world_size, rank, trainer.max_steps, lambda: trainer.global_step),
        )

    def val_dataloader(self) -> list[DataLoader]:
        world_size, rank = self._ranks
        return [
            self._loader(rows, RowBatches(len(rows), self.val_batch_rows, world_size, rank)) for rows in self.val_sets()
        ]

    def transfer_batch_to_device(self, batch: dict[str, torch.Tensor], device: torch.device,
                                 dataloader_idx: int) -> Any:
        """To the device, but for what the host reads (document boundaries, lanes), where that waits for nothing."""
        on_host = {name: batch[name] for name in ("cu_seqlens", "lanes") if name in batch}
        rest = {name: value for name, value in batch.items() if name not in on_host}
        return super().transfer_batch_to_device(rest, device, dataloader_idx) | on_host

    def state_dict(self) -> dict[str, Any]:
        """`samples`: samples trained so far, by all ranks. The rest is there to be checked on resume."""
        step = self.trainer.global_step if self.trainer is not None else 0
        rows = self.batch_plan(self._ranks[0]).rows_per_step
        return {"samples": step * rows, "rows_per_step": rows, "fingerprint": self.fingerprint, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint of other data; the position itself comes from the restored global step."""
        rows = self.batch_plan(self._ranks[0]).rows_per_step
        for what, here, mend in (
            ("fingerprint", self.fingerprint, "use the same data settings and store, or start a new run"),
            ("seed", self.seed, "set the data seed to the checkpoint's, or start a new run"),
            (
                "rows_per_step",
                rows,
                "set global_batch_tokens to the checkpoint's rows x row length, or start a new run",
            ),
        ):
            if state_dict[what] != here:
                raise ValueError(
                    f"the checkpoint was trained on data with {what} [{state_dict[what]}], this run has [{here}]: "
                    f"{mend}"
                )
