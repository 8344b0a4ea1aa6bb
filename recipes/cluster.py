"""What a SLURM job must look like for a configuration: one task per GPU, a global batch that all ranks share evenly."""

import os
import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from recipes.job import Job, number
from recipes.planning import count, store_problem, strategy_of


def on_gpus(job: Job, trainer: Mapping[str, Any]) -> bool:
    """Whether this job trains on GPUs."""
    return trainer["accelerator"] in ("gpu", "cuda") or (trainer["accelerator"] == "auto" and job.gpus > 0)


def problems(job: Job, trainer: Mapping[str, Any], data: Any) -> list[str]:
    """What would stop the run or waste its machines, the store aside, each with its mend; empty where all fits.

    Args:
        trainer: the configuration's group of that name: accelerator, devices, num_nodes.
        data: the run's data module: batch_plan(ranks) and num_workers.
    """
    found, tasks, gpus = [], job.tasks or job.gpus or 1, on_gpus(job, trainer)
    per_node = job.gpus if gpus and job.gpus else tasks
    if gpus and not job.gpus:
        found.append(f"trainer.accelerator is {trainer['accelerator']} and the job asks for no GPUs: it needs the "
                     f"lines\n    #SBATCH --gpus-per-node={tasks}\n    #SBATCH --ntasks-per-node={tasks}")
    elif job.tasks != per_node:
        there = count(job.tasks, "task") if job.tasks else "unequal numbers of tasks"
        found.append(f"{there} on nodes of {count(job.gpus, 'GPU')}, but it is one task per GPU: it needs the lines\n"
                     f"    #SBATCH --ntasks-per-node={per_node}\n    #SBATCH --gpus-per-node={job.gpus}")
    devices = trainer["devices"]
    asked = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else None
    if asked is None and not gpus and per_node > 1:
        asked = 1  # what auto means on a CPU
    if asked not in (None, per_node):
        found.append(f"trainer.devices is {devices} and a node has {count(per_node, 'GPU' if gpus else 'task')}: set "
                     f"--trainer.devices {per_node}, or ask for\n    #SBATCH --ntasks-per-node={asked}"
                     + (f"\n    #SBATCH --gpus-per-node={asked}" if gpus else ""))
    if trainer["num_nodes"] != job.nodes:
        found.append(f"trainer.num_nodes is {trainer['num_nodes']} and the job has {count(job.nodes, 'node')}: set "
                     f"--trainer.num_nodes {job.nodes}, or ask for\n    #SBATCH --nodes={trainer['num_nodes']}")
    try:
        data.batch_plan(job.nodes * per_node)
    except ValueError as error:
        found.append(str(error))
    if job.cpus and job.cpus < data.num_workers + 1:
        found.append(f"{count(job.cpus, 'core')} a task for a process and {count(data.num_workers, 'loader worker')}: "
                     f"it needs the line\n    #SBATCH --cpus-per-task={data.num_workers + 1}")
    return found


def check_task(trainer: Mapping[str, Any], data: Any) -> None:
    """ValueError with all problems of the job that this process is a task of; before any work is done."""
    ranks, found = number(os.environ, "SLURM_NTASKS"), problems(Job.here(), trainer, data)
    if ranks > 1 and not re.fullmatch(r"\d+", os.environ.get("SLURM_STEP_ID", "")):
        found.insert(0, f"one process of {ranks} was started: put srun before python")
    if found := [*found, *filter(None, [store_problem(data, ranks)])]:
        raise ValueError("the job does not fit the configuration (python -m recipes.preflight tells it beforehand)\n- "
                         + "\n- ".join(found))


def check_machine(trainer: Mapping[str, Any]) -> None:
    """ValueError for what a run asks for and nothing here gives it: GPUs, processes on other machines, a strategy."""
    if isinstance(trainer["strategy"], str):
        strategy_of(trainer, 2)
    there = CUDAAccelerator.is_available() or MPSAccelerator.is_available()
    if trainer["accelerator"] in ("gpu", "cuda") and not there:
        raise ValueError(f"trainer.accelerator is {trainer['accelerator']} and PyTorch finds no GPU here: give "
                         "--trainer.accelerator cpu, or install a torch that knows this machine's GPUs")
    launchers = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
    started = "NODE_RANK" in os.environ or any(launcher.detect() for launcher in launchers)
    if trainer["num_nodes"] > 1 and not started:
        raise ValueError(f"trainer.num_nodes is {trainer['num_nodes']} and nothing starts the other machines' "
                         "processes: submit it (sbatch slurm/pretrain.sbatch ...), start each machine's with torchrun, "
                         "or give --trainer.num_nodes 1 (a run goes on at any number of processes)")
