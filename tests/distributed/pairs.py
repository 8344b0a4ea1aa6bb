"""Saves under each way of the list, then resumes each of them under each; see test_neutral.py.

    python pairs.py FOLDER STORE WAYS      with WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for two processes

WAYS: names of run.strategy with the number of processes, one*1,ddp*2,zero3*2; each process trains those of its own number.
Each way leaves FOLDER/<way>.pt (the run left alone) and, resumed from another's step STOP, FOLDER/<from>-<to>.pt.
"""

import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from run import STOP, WORLD, record, train

from vla_lm.native import export

ACCUMULATION = {1: 4, 2: 2}  # of this many micro-batches by the number of processes


class SaveAtStart(pl.Callback):
    """Saves what has been loaded, before a step is trained."""

    def on_train_start(self, trainer, pl_module):
        path = Path(trainer.default_root_dir) / "untouched.ckpt"
        path.parent.mkdir(exist_ok=True)
        trainer.save_checkpoint(path)
        io = trainer.strategy.checkpoint_io
        io.begin(None)
        io.finish()
        trainer.strategy.barrier()


def saved(folder: Path, way: str) -> Path:
    return folder / way / "checkpoints" / f"step={STOP:06d}.ckpt"


def wait_for(path: Path) -> None:
    begun = time.monotonic()
    while not path.exists():
        assert time.monotonic() - begun < 200, f"{path} did not come"
        time.sleep(0.1)


def main(folder: Path, store: str, ways: list[str]) -> None:
    mine = [way for way in ways if int(way[-1]) == WORLD]
    settings = {"accumulation": ACCUMULATION[WORLD], "store": None if store == "none" else store}
    for way in mine:
        record(folder, way, train(folder / way, way[:-2], **settings))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                export(saved(folder, way))
            torch.distributed.barrier()
        else:
            export(saved(folder, way))
    for source in ways:
        wait_for(saved(folder, source).with_suffix(".neutral"))
        for way in mine:
            case = f"{source}-{way}"
            watch = train(folder / case, way[:-2], resume=saved(folder, source), extra=[SaveAtStart()], **settings)
            record(folder, case, watch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
