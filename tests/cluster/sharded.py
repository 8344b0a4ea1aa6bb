"""One of two gloo processes: a run under ZeRO that is warned, saves, and goes on; see test_faults.py.

    python sharded.py FOLDER STAGE      with WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
"""

import os
import signal
import sys
from pathlib import Path

import run
import torch
from faults import Deed

from callbacks import Preempted, Preemption, newest_complete


class OfTheRun(Preemption):
    """Saves with the run's own checkpoint callback."""

    def __init__(self) -> None:
        super().__init__(None)

    def setup(self, trainer, pl_module, stage) -> None:
        self.checkpoint = trainer.checkpoint_callback


def main(folder: Path, way: str) -> None:
    whole, ends = run.train(folder / "whole", way, 2), OfTheRun()
    try:
        with ends.listening():
            run.train(folder / "warned", way, 2, extra=[Deed("SIGUSR1", step=2), ends])
    except Preempted as stop:
        assert stop.code == 85 and newest_complete(folder / "warned").name == "step=000003.ckpt", stop
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    resumed = run.train(folder / "warned", way, 2, resume=newest_complete(folder / "warned"))
    assert sorted(resumed.weights) == [3, 4, 5, 6]
    assert all(torch.equal(value, resumed.weights[6][name]) for name, value in whole.weights[6].items())
    print(f"rank {os.environ['LOCAL_RANK']} went on to the bit")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
