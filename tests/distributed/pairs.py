"""Saves under one strategy and resumes under another; see test_neutral.py.

    python pairs.py FOLDER STORE CASES      with WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for two processes

CASES, by commas; a way is a name of run.strategy and its number of processes:

    zero1*2                 trains all steps, left alone
    zero1*2>one*1           resumes that run's checkpoint of step STOP; zero1*2n>one*1: the neutral form of it
    one*1>zero3*2>ddp*2     two steps each
    bf16-true/zero1*2       in this precision

Each process trains what has its own number of processes. A case leaves FOLDER/<case>.pt, as run.record writes it, with
slashes and > as _ and * as x; a resumed one also <case>/untouched.ckpt, saved before its first step.
"""

import re
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from run import STEPS, STOP, WORLD, record, train

from vla_lm.native import export

ACCUMULATION = {1: 4, 2: 2}  # micro-batches by the number of processes


class SaveAtStart(pl.Callback):
    """Saves what has been loaded, before a step is trained."""

    def on_train_start(self, trainer, pl_module):
        path = Path(trainer.default_root_dir) / "untouched.ckpt"
        path.parent.mkdir(exist_ok=True)
        trainer.save_checkpoint(path)


class StopAt(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step == self.step


def name(case: str) -> str:
    return re.sub(r"[/>]", "_", case).replace("*", "x")  # DeepSpeed takes a * in a path for a pattern


def saved(folder: Path, case: str, step: int = STOP) -> Path:
    return folder / name(case) / "checkpoints" / f"step={step:06d}.ckpt"


def wait_for(path: Path) -> None:
    begun = time.monotonic()
    while not path.exists():
        assert time.monotonic() - begun < 300, f"{path} did not come"
        time.sleep(0.1)


def one_process(action) -> None:
    """On the first rank, the others wait."""
    several = torch.distributed.is_initialized()
    if not several or torch.distributed.get_rank() == 0:
        action()
    if several:
        torch.distributed.barrier()


def main(folder: Path, store: str, cases: list[str]) -> None:
    # Runs that others go on from come first, so that no process waits for one that waits for it.
    for case in sorted(cases, key=lambda case: case.count(">")):
        kind, _, ways = case.rpartition("/")
        settings = {"store": None if store == "none" else store, "precision": kind or "32-true"}
        ways = ways.split(">")
        for place, way in enumerate(ways):
            if int(way.rstrip("n")[-1]) != WORLD or (len(ways) == 2 and place == 0):
                continue
            settings["accumulation"], extra, resume, into = ACCUMULATION[WORLD], [], None, folder / name(case)
            if len(ways) == 2:
                extra = [SaveAtStart()]
                source = saved(folder, case.split(">")[0].rstrip("n"))
                resume = source.with_suffix(".neutral") if ways[0].endswith("n") else source
                wait_for(source.with_suffix(".neutral"))
            if len(ways) == 3:
                extra = [StopAt(2 * (place + 1))]
                resume = saved(folder, case, 2 * place) if place else None
                wait_for(Path(f"{resume}.complete")) if resume else None
            watch = train(into, way[:-2], resume=resume, extra=extra, **settings)
            if STEPS in watch.weights:
                record(folder, name(case), watch)
            if len(ways) == 1:
                one_process(lambda: export(saved(folder, case)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
