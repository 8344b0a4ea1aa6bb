"""Two processes, one of which fails to write a checkpoint, or to collect what to write; see test_failing_save.py.

    python failing.py FOLDER STORE      with WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT

Leaves FOLDER/<way>-rank<rank>.json: what ended the run, after how many seconds, and what a resume trained.
"""

import errno
import json
import sys
import time
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from run import RANK, STEPS, train

from callbacks import CheckpointError, newest_complete, read_metrics
from vla_lm.lanes import LaneStates

FULL_AT, ROOM = 4, 1000  # step whose save fails, bytes that are still written


class FullDisk(pl.Callback):
    """From FULL_AT on torch.save writes ROOM bytes on the rank that is given and fails."""

    def __init__(self, rank: int, slow: float) -> None:
        self.rank, self.slow = rank, slow

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == FULL_AT - 1:
            torch.save = self.fail if RANK == self.rank else self.late

    def fail(self, state, path, **options):
        time.sleep(self.slow)
        Path(path).write_bytes(bytes(ROOM))
        raise OSError(errno.ENOSPC, "No space left on device")

    def late(self, state, path, save=torch.save, **options):
        time.sleep(self.slow)
        save(state, path, **options)


class NoMemory(pl.Callback):
    """From FULL_AT on a method fails on the second rank, as on a full GPU."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == FULL_AT - 1 and RANK == 1:
            setattr(self.owner, self.name, mock.Mock(side_effect=RuntimeError("out of memory")))


def main(folder: Path, store: str) -> None:
    # slow: the write fails while training has gone on for a step or more.
    weights, own = DeepSpeedEngine._save_checkpoint, LaneStates.own
    for case, way, failing, documents in (
        ("zero1", "zero1", FullDisk(1, 0), None), ("zero3", "zero3", FullDisk(1, 0), None),
        ("zero3-later", "zero3", FullDisk(1, 0.8), None), ("ddp", "ddp", FullDisk(0, 0), None),
        ("zero3-collect", "zero3", NoMemory(DeepSpeedEngine, "_save_checkpoint"), None),
        ("zero3-lanes", "zero3", NoMemory(LaneStates, "own"), store),
        ("ddp-lanes", "ddp", NoMemory(LaneStates, "own"), store),
    ):  # fmt: skip
        begun, ended = time.monotonic(), None
        with mock.patch("torch.save", torch.save):
            try:
                train(folder / case, way, 2, extra=[failing], store=documents)
            except CheckpointError as error:
                ended = str(error)
        took = time.monotonic() - begun
        DeepSpeedEngine._save_checkpoint, LaneStates.own = weights, own
        newest = newest_complete(folder / case)
        train(folder / case, way, 2, resume=newest, store=documents)
        lines = read_metrics(folder / case / "metrics.jsonl")
        found = {"ended": ended, "seconds": took, "resumed": newest.name, "newest": newest_complete(folder / case).name,
                 "steps": sorted(line["step"] for line in lines if "train/loss" in line)}  # fmt: skip
        (folder / f"{case}-rank{RANK}.json").write_text(json.dumps(found | {"last": STEPS}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
