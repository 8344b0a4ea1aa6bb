"""Train the same steps under several strategies, then go on under another one from each: losses, speed, memory.

    python -m recipes.strategies --config configs/longdoc-125m.yaml --devices 2

A run takes --steps and --more optimizer steps; from the checkpoint between them the next strategy of the list takes the
last ones again: two runs for each strategy, twelve for the six of the default. All other arguments go to
recipes.pretrain. What has run is not repeated. With --one_gpu the ranks share one GPU: before a cluster is at hand.
"""

import argparse
import json
import sys
from pathlib import Path

from jsonargparse.typing import PositiveInt
from rich.console import Console
from rich.table import Table

from callbacks.run_folder import write_aside
from recipes.comparable import KNOWN, check, claim, command, overlay, ranks
from recipes.compared import apart, train
from recipes.console import bad_input
from recipes.notices import quiet_notices

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
    parser.add_argument("--one_gpu", action="store_true", help="All ranks on the first GPU (recipes.virtual_nodes): "
                        "losses and memory as on --devices of them, speed not.")
    parser.add_argument("--steps", type=PositiveInt, default=200, help="Optimizer steps before the checkpoint.")
    parser.add_argument("--more", type=PositiveInt, default=20, help="Optimizer steps after it.")
    parser.add_argument("--out", type=Path, default=Path("runs/strategies"), help="Folder of runs and table.json.")
    return parser.parse_known_args(argv)


def made(args: argparse.Namespace, rest: list[str], strategy: str, name: str, start: str = "auto") -> dict:
    """The numbers of the run of that name."""
    nodes = ranks(args, strategy) if args.one_gpu else 1
    return train([*command(args, rest, strategy), "--resume", start], args.out / name, args.steps,
                 args.steps + args.more, nodes)


def main(argv: list[str] | None = None) -> None:
    (args, rest), console, report = parse(argv), Console(width=None if sys.stdout.isatty() else 150), {}
    names, last = args.strategies, args.steps + args.more
    quiet_notices()
    with bad_input():
        if len(args.config) > 1 or not Path(args.config[0]).is_file():
            raise ValueError(f"--config {' '.join(args.config)}: expected one file that is there, as configs/mqar.yaml")
        args.config, = args.config
        check(args, rest)
        setting = {name: getattr(args, name) for name in ("config", "devices", "steps", "more")} | {"others": rest}
        setting |= {"one_gpu": True} if args.one_gpu else {}
        new = claim(args.out, setting, [Path(args.config), *map(overlay, names)])
    table = Table(title=f"{args.config}: losses of {args.more} steps after {args.steps}")
    for name in ("", "ranks", "last loss", f"from {names[0]}'s", *(title for _, title, _ in COLUMNS), "gone on under"):
        table.add_column(name, justify="right" if name else "left")
    for strategy, other in zip(names, names[1:] + names[:1]):
        console.print(f"{strategy}: {last} steps, the last {args.more} again under {other}")
        again = run = report[strategy] = made(args, rest, strategy, strategy)
        if run.get("code") == 2 and len(report) == 1:  # refused, as all the others would be
            if new:
                (args.out / "setting.json").unlink()  # nothing has run: the folder is free for another call
            print(f"error: {run['failed']}", file=sys.stderr)
            sys.exit(2)
        if "failed" not in run:
            point = args.out / strategy / "checkpoints" / f"step={args.steps:06d}.ckpt"
            again = run["gone on"] = made(args, rest, other, f"{strategy}-then-{other}", str(point))
        if failed := again.get("failed"):
            console.print(f"[red]{failed}", soft_wrap=True)
        if "failed" not in run:
            first = f"{apart(run, report[names[0]]):.1e}" if "losses" in report[names[0]] else ""
            cells = (f"{run[name]:,.{digits}f}" if run[name] else "–" for name, _, digits in COLUMNS)
            table.add_row(strategy, str(ranks(args, strategy)), f"{max(run['losses'].items())[1]:.4f}", first, *cells,
                          f"{other}: " + (f"{apart(again, run):.1e}" if "losses" in again else "failed"))
        write_aside(args.out / "table.json", json.dumps(report, indent=1))
    table.caption = ("gone on under: largest distance of its losses from those of the row's own run; "
                     "memory where there is a GPU" + ("; ranks shared one device" if args.one_gpu else ""))
    console.print(table)
    console.print(f"written: {args.out / 'table.json'}; the runs lie beside it", soft_wrap=True)
    sys.exit(1 if any("failed" in x or "failed" in x["gone on"] for x in report.values()) else 0)


if __name__ == "__main__":
    main()
