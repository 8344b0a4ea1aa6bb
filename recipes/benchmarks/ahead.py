"""Compiling what a run will measure, many rows at once: alone, a peer's autotuning compiles for a minute and more."""

import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import track

from recipes.benchmarks.contenders import CONTENDERS, Contender, make_inputs
from recipes.benchmarks.measure import Shape


def compile_ahead(work: list[tuple[Contender, Shape]], dtype: torch.dtype, device: torch.device, readout: str,
                  jobs: int, console: Console) -> None:
    """Runs each row once at its shape, forward and backward, in `jobs` processes, so that Triton's cache on disk has
    its kernels. Prints how many did not run.

    What is tuned here, with the GPU shared, is not kept: the run that measures tunes again, from compiled kernels.
    """
    work = {(row.name, shape): (row.name, shape, dtype, device, readout) for row, shape in work
            if row.name != "vla-loop" and row.refusal("forward", shape, device) is None}
    with ProcessPoolExecutor(min(jobs, len(work)) or 1, get_context("spawn"), _own_tuning) as pool:
        results = [pool.submit(_once, *item) for item in work.values()]
        failed = sum(x.exception() is not None
                     for x in track(as_completed(results), "compiling", len(results), console=console))
    if failed:
        console.print(f"{failed} of {len(results)} did not run ahead; where they are measured, their rows say why",
                      soft_wrap=True)


def _own_tuning() -> None:
    os.environ["FLA_CACHE_RESULTS"] = "0"  # flash-linear-attention's tuning on disk
    os.environ["TRITON_CACHE_AUTOTUNING"] = "0"


def _once(name: str, shape: Shape, dtype: torch.dtype, device: torch.device, readout: str) -> None:
    row = CONTENDERS[name]
    backward = row.refusal("both", shape, device) is None
    call, leaves = row.prepare(make_inputs(shape, dtype, device) | {"readout": readout})
    with torch.set_grad_enabled(backward):  # a row without a backward pass refuses inputs that want one
        o = call()
    if backward:
        torch.autograd.grad(o, leaves, torch.ones_like(o), allow_unused=True)
