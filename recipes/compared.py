"""Runs of `recipes.pretrain` made to be compared: one at a time, once each, and their numbers."""

import sys
from pathlib import Path

from callbacks import read_metrics
from recipes.processes import to_the_end


def train(command: list, folder: Path, after: int, last: int, nodes: int = 1) -> dict:
    """The `numbers` of a run into `folder`, made unless it is there whole; {"failed": why, "code"} where it ends else.

    command: arguments of recipes.pretrain. What it prints goes to <folder>.log.
    last: its last step.
    nodes: above 1, it is `recipes.virtual_nodes` of so many.
    """
    log = Path(f"{folder}.log")
    if not (folder / "done").exists():
        with log.open("w") as file:
            recipe = ["recipes.virtual_nodes", str(nodes)] if nodes > 1 else ["recipes.pretrain"]
            code = to_the_end([sys.executable, "-m", *recipe, "--run_dir", str(folder), *map(str, command)], file)
        if code != 0:
            # Of input that was refused its whole message, else the last line.
            said = log.read_text().strip().rpartition("error: " if code == 2 else "\n")[2]
            return {"failed": f"exit code {code}: {said or 'no output'} (see {log})", "code": code}
        if last not in numbers(folder, after)["losses"]:
            return {"failed": f"it ended before step {last} (see {log})", "code": 0}
        (folder / "done").touch()
    return numbers(folder, after)


def numbers(folder: Path, after: int) -> dict:
    """Losses of steps after `after`; median tokens/s; the peak of memory in GB and its plan, where there is a GPU."""
    lines = read_metrics(folder / "metrics.jsonl")
    rates, peaks, planned = ([line[name] for line in lines if line.get(name) is not None] for name in (
        "throughput/tokens_per_second", "throughput/device_memory_gb", "memory/planned_gb"))
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line and line["step"] > after}
    return {"losses": losses, "tokens_per_second": sorted(rates)[len(rates) // 2] if rates else None,
            "peak_gb": max(peaks, default=None), "planned_gb": planned[-1] if planned else None}


def apart(run: dict, other: dict) -> float:
    """Largest relative distance of the two runs' losses, step by step."""
    return max(abs(run["losses"][step] / loss - 1) for step, loss in other["losses"].items())
