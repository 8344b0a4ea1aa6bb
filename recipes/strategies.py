"""Train the same steps under several strategies, then go on under another one from each: losses, speed, memory.

    python -m recipes.strategies --config configs/longdoc-125m.yaml --devices 2

A run takes --steps and --more optimizer steps; from the checkpoint between them the next strategy of the list takes the
last ones again: two runs for each strategy, twelve for the six of the default. All other arguments go to
recipes.pretrain. What has run is not repeated.
"""

import argparse
import json
import sys
from pathlib import Path

from jsonargparse.typing import PositiveInt
from rich.console import Console
from rich.table import Table

from callbacks.run_folder import write_aside
from recipes.comparable import check, claim
from recipes.compared import apart, train
from recipes.console import bad_input, quiet_notices

FOLDER = Path(__file__).parents[1] / "configs/strategy"
KNOWN = sorted(path.stem for path in FOLDER.glob("*.yaml"))
COLUMNS = (("tokens_per_second", "tokens/s", 0), ("peak_gb", "peak, GB", 2), ("planned_gb", "planned, GB", 2))
# The description as it is written, and each default.
HELP = type("Help", (argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter), {})


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m recipes.strategies", description=__doc__, allow_abbrev=False,
                                     formatter_class=HELP)
    parser.add_argument("--config", required=True, action="append", default=argparse.SUPPRESS,
                        help="The run's configuration.")
    parser.add_argument("--strategies", nargs="+", choices=KNOWN, help="Files of configs/strategy.",
                        default=["single", "ddp", "zero1", "zero2", "zero3", "zero3-offload"])
    parser.add_argument("--devices", type=PositiveInt, default=2, help="Ranks of all but single.")
    parser.add_argument("--steps", type=PositiveInt, default=200, help="Optimizer steps before the checkpoint.")
    parser.add_argument("--more", type=PositiveInt, default=20, help="Optimizer steps after it.")
    parser.add_argument("--out", type=Path, default=Path("runs/strategies"), help="Folder of runs and table.json.")
    return parser.parse_known_args(argv)


def command(args: argparse.Namespace, rest: list[str], strategy: str) -> list[str]:
    """Arguments of recipes.pretrain."""
    last, devices = args.steps + args.more, 1 if strategy == "single" else args.devices
    return [*map(str, (
        "--config", args.config, "--config", FOLDER / f"{strategy}.yaml", "--trainer.devices", devices,
        "--trainer.max_steps", last, "--trainer.val_check_interval", last, "--trainer.log_every_n_steps", 1,
        "--checkpoint.every_n_train_steps", args.steps, "--checkpoint.keep_every_n_steps", args.steps,
        "--model.optimizer.warmup_steps", last // 4)), *rest]


def main(argv: list[str] | None = None) -> None:
    (args, rest), console, report = parse(argv), Console(width=None if sys.stdout.isatty() else 150), {}
    names, last = args.strategies, args.steps + args.more
    quiet_notices()
    with bad_input():
        if len(args.config) > 1 or not Path(args.config[0]).is_file():
            raise ValueError(f"--config {' '.join(args.config)}: expected one file that is there, as configs/mqar.yaml")
        args.config, = args.config
        check(command(args, [], names[0]), rest, [1 if name == "single" else args.devices for name in names])
        setting = {name: getattr(args, name) for name in ("config", "devices", "steps", "more")} | {"others": rest}
        new = claim(args.out, setting, [Path(args.config), *(FOLDER / f"{name}.yaml" for name in names)])
    table = Table(title=f"{args.config}: losses of {args.more} steps after {args.steps}")
    for name in ("", "ranks", "last loss", f"from {names[0]}'s", *(title for _, title, _ in COLUMNS), "gone on under"):
        table.add_column(name, justify="right" if name else "left")
    for strategy, other in zip(names, names[1:] + names[:1]):
        console.print(f"{strategy}: {last} steps, the last {args.more} again under {other}")
        folder, again_folder = args.out / strategy, args.out / f"{strategy}-then-{other}"
        again = run = report[strategy] = train([*command(args, rest, strategy), "--resume", "auto"],
                                               folder, args.steps, last)
        if run.get("code") == 2 and len(report) == 1:  # refused, as all the others would be
            if new:
                (args.out / "setting.json").unlink()  # nothing has run: the folder is free for another call
            print(f"error: {run['failed']}", file=sys.stderr)
            sys.exit(2)
        if "failed" not in run:
            point = folder / "checkpoints" / f"step={args.steps:06d}.ckpt"
            again = run["gone on"] = train([*command(args, rest, other), "--resume", str(point)],
                                            again_folder, args.steps, last)
        if failed := again.get("failed"):
            console.print(f"[red]{failed}", soft_wrap=True)
        if "failed" not in run:
            first = f"{apart(run, report[names[0]]):.1e}" if "losses" in report[names[0]] else ""
            cells = (f"{run[name]:,.{digits}f}" if run[name] else "–" for name, _, digits in COLUMNS)
            table.add_row(strategy, "1" if strategy == "single" else str(args.devices),
                          f"{max(run['losses'].items())[1]:.4f}", first, *cells,
                          f"{other}: " + (f"{apart(again, run):.1e}" if "losses" in again else "failed"))
        write_aside(args.out / "table.json", json.dumps(report, indent=1))
    table.caption = ("gone on under: largest distance of its losses from those of the row's own run; "
                     "memory where there is a GPU")
    console.print(table)
    console.print(f"written: {args.out / 'table.json'}; the runs lie beside it", soft_wrap=True)
    sys.exit(1 if any("failed" in x or "failed" in x["gone on"] for x in report.values()) else 0)


if __name__ == "__main__":
    main()
