"""Two processes whose disk is full on the second rank while a checkpoint is written; see test_failing_save.py.

    python failing.py FOLDER      with WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT

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
from run import RANK, STEPS, train

from callbacks import CheckpointError, newest_complete, read_metrics

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


def main(folder: Path) -> None:
    # slow: the write fails while training has gone on for a step or more.
    for case, way, rank, slow in (("zero1", "zero1", 1, 0), ("zero3", "zero3", 1, 0), ("zero3-later", "zero3", 1, 0.8),
                                  ("ddp", "ddp", 0, 0)):  # fmt: skip
        begun, ended = time.monotonic(), None
        with mock.patch("torch.save", torch.save):
            try:
                train(folder / case, way, 2, extra=[FullDisk(rank, slow)])
            except CheckpointError as error:
                ended = str(error)
        took = time.monotonic() - begun
        newest = newest_complete(folder / case)
        train(folder / case, way, 2, resume=newest)
        lines = read_metrics(folder / case / "metrics.jsonl")
        found = {"ended": ended, "seconds": took, "resumed": newest.name, "newest": newest_complete(folder / case).name,
                 "steps": sorted(line["step"] for line in lines if "train/loss" in line)}  # fmt: skip
        (folder / f"{case}-rank{RANK}.json").write_text(json.dumps(found | {"last": STEPS}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
