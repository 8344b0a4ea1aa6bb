"""Train the same steps under several strategies, then go on under another one from each: losses, speed, memory.

    python -m recipes.strategies --config configs/longdoc-125m.yaml --devices 2

A run takes --steps and --more optimizer steps; from the checkpoint between them the next strategy takes the last ones
again. Other arguments go to recipes.pretrain. What has run is not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from jsonargparse.typing import PositiveInt
from rich.console import Console
from rich.table import Table

from callbacks import read_metrics

FOLDER = Path(__file__).parents[1] / "configs/strategy"
KNOWN = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m recipes.strategies", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--config", required=True, help="The run's configuration.")
    parser.add_argument("--strategies", nargs="+", choices=KNOWN, help="Files of configs/strategy.",
                        default=["single", "ddp", "zero1", "zero2", "zero3", "zero3-offload"])
    for name, default, what in (("devices", 2, "Ranks of all but single."), ("more", 20, "Optimizer steps after it."),
                                ("steps", 200, "Optimizer steps before the checkpoint.")):
        parser.add_argument(f"--{name}", type=PositiveInt, default=default, help=what)
    parser.add_argument("--out", type=Path, default=Path("runs/strategies"), help="Folder of the runs and of table.json.")
    return parser.parse_known_args(argv)


def train(args: argparse.Namespace, rest: list[str], strategy: str, folder: Path, resume: Path | str = "auto") -> dict:
    """One run to its end: its numbers, or {"failed": why}."""
    last, devices = args.steps + args.more, 1 if strategy == "single" else args.devices
    command = ["-m", "recipes.pretrain", "--config", args.config, "--config", FOLDER / f"{strategy}.yaml",
               "--run_dir", folder, "--trainer.devices", devices, "--trainer.max_steps", last,
               "--trainer.val_check_interval", last, "--trainer.log_every_n_steps", 1,
               "--model.optimizer.warmup_steps", last // 4, "--checkpoint.every_n_train_steps", args.steps, *rest]
    if not (folder / "done").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = Path(f"{folder}.log")
        with log.open("w") as file:
            code = subprocess.run([sys.executable, *map(str, command), "--resume", str(resume)], stdout=file,
                                  stderr=subprocess.STDOUT).returncode
        if code != 0:
            said = [line for line in log.read_text().splitlines() if line.strip()]
            return {"failed": f"exit code {code}: {said[-1] if said else 'no output'} (see {log})"}
        (folder / "done").touch()
    return numbers(folder, args.steps)


def numbers(folder: Path, after: int) -> dict:
    """Losses of the steps after `after`; median tokens/s; the peak of memory in GB and its plan, where there is a GPU."""
    lines = read_metrics(folder / "metrics.jsonl")
    rates, peaks, planned = ([line[name] for line in lines if line.get(name) is not None] for name in (
        "throughput/tokens_per_second", "throughput/device_memory_gb", "memory/planned_gb"))
    return {"losses": {line["step"]: line["train/loss"] for line in lines if "train/loss" in line and line["step"] > after},
            "tokens_per_second": sorted(rates)[len(rates) // 2] if rates else None,
            "peak_gb": max(peaks, default=None), "planned_gb": planned[-1] if planned else None}


def apart(run: dict, other: dict) -> float:
    """Largest relative distance of the two runs' losses, step by step."""
    return max(abs(run["losses"][step] / loss - 1) for step, loss in other["losses"].items())


def main(argv: list[str] | None = None) -> None:
    (args, rest), console, report = parse(argv), Console(width=None if sys.stdout.isatty() else 150), {}
    table, names = Table(title=f"{args.config}: losses of {args.more} steps after {args.steps}"), args.strategies
    for name in ("", "ranks", "last loss", f"from {names[0]}'s", "tokens/s", "peak, GB", "planned, GB", "gone on under"):
        table.add_column(name, justify="right" if name else "left")
    for strategy, other in zip(names, names[1:] + names[:1]):
        console.print(f"{strategy}: {args.steps + args.more} steps, the last {args.more} again under {other}")
        again = run = report[strategy] = train(args, rest, strategy, args.out / strategy)
        if "failed" not in run:
            point = args.out / strategy / "checkpoints" / f"step={args.steps:06d}.ckpt"
            again = run["gone on"] = train(args, rest, other, args.out / f"{strategy}-then-{other}", point)
        if failed := again.get("failed"):
            console.print(f"[red]{failed}", soft_wrap=True)
        if "failed" not in run:
            first = f"{apart(run, report[names[0]]):.1e}" if "losses" in report[names[0]] else ""
            cells = (f"{run[name]:,.{digits}f}" if run[name] else ""
                     for name, digits in (("tokens_per_second", 0), ("peak_gb", 2), ("planned_gb", 2)))
            table.add_row(strategy, "1" if strategy == "single" else str(args.devices), f"{max(run['losses'].items())[1]:.4f}",
                          first, *cells, f"{other}: " + (f"{apart(again, run):.1e}" if "losses" in again else "failed"))
        (args.out / "table.json").write_text(json.dumps(report, indent=1))
    console.print(table)
    console.print(f"written: {args.out / 'table.json'}; the runs lie beside it", soft_wrap=True)
    sys.exit(1 if any("failed" in x or "failed" in x["gone on"] for x in report.values()) else 0)


if __name__ == "__main__":
    main()
