"""The job that a process is in, as its scheduler describes it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning.pytorch.plugins.environments import SLURMEnvironment

from recipes.planning import count


@dataclass(frozen=True)
class Job:
    """What was asked of the scheduler.

    nodes: machines.
    tasks: processes on each; None where they differ from node to node.
    gpus: GPUs on each.
    cpus: processor cores of a task; None where not asked for.
    """

    nodes: int
    tasks: int | None
    gpus: int
    cpus: int | None = None

    def __str__(self) -> str:
        return f"{count(self.nodes, 'node')} x {count(self.tasks or '?', 'task')}, {count(self.gpus, 'GPU')} a node"

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Job":
        """The job that this process is in, from the variables that SLURM sets; ValueError where one makes no sense."""
        def first(*names: str) -> str | None:
            return next((name for name in names if environment.get(name)), None)

        nodes, cpus = first("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), first("SLURM_CPUS_PER_TASK")
        tasks = first("SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        gpus = first("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
        return cls(
            number(environment, nodes, r"(\d+)") if nodes else 1,
            # "2(x3)": two on each of three nodes; "2,1": not the same on all.
            1 if not tasks else None if "," in environment[tasks]
            else number(environment, tasks, r"(\d+)(?:\(x\d+\))?"),
            # "a100:1,v100:2": three, of two kinds.
            sum(number(environment, gpus, r"(?:[^:,]+:)?(\d+)", part, least=0) for part in environment[gpus].split(","))
            if gpus else 0,
            number(environment, cpus) if cpus else None)


def number(environment: Mapping[str, str], name: str, form: str = r"(\d+)", text: str | None = None,
           least: int = 1) -> int:
    """The number in a variable of SLURM's, or in `text`, a part of it. ValueError where none is at least `least`."""
    found = re.fullmatch(form, environment[name] if text is None else text)
    if not found or int(found[1]) < least:
        raise ValueError(f"{name} is {environment[name]!r}: expected a whole number, at least {least}, "
                         f"as SLURM sets it: leave the variable to SLURM (unset {name}), or submit the job anew")
    return int(found[1])


def in_job() -> bool:
    """Whether SLURM started this process as a task of a batch job (an interactive shell is left alone)."""
    return SLURMEnvironment.detect()
