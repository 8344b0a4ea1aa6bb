"""Runs to be compared, and whether they can be: what they are asked, their machine, and what lies in their folder."""

import argparse
import hashlib
import json
from pathlib import Path

from lightning.pytorch.accelerators import CUDAAccelerator

from callbacks.run_folder import write_aside
from recipes.cluster import check_machine
from recipes.console import arguments
from recipes.dry_run import Configuration, check_run
from recipes.planning import count

FOLDER = Path(__file__).parents[1] / "configs/strategy"
KNOWN = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# Options of a run that are the comparison's own, beside those it puts into a command.
OWN = {"--config", "-c", "--run_dir", "--resume", "--trainer.strategy", "--trainer.devices", "--trainer.num_nodes"}
FREE = {"--model.optimizer.warmup_steps"}  # a start that may be another


def overlay(strategy: str) -> Path:
    return FOLDER / f"{strategy}.yaml"


def ranks(args: argparse.Namespace, strategy: str) -> int:
    """Processes of a run."""
    return 1 if strategy == "single" else args.devices


def command(args: argparse.Namespace, rest: list[str], strategy: str) -> list[str]:
    """Arguments of recipes.pretrain."""
    last = args.steps + args.more
    devices = () if args.one_gpu else ("--trainer.devices", ranks(args, strategy))  # recipes.virtual_nodes sets them
    return [*map(str, (
        "--config", args.config, "--config", overlay(strategy), *devices,
        "--trainer.max_steps", last, "--trainer.val_check_interval", last, "--trainer.log_every_n_steps", 1,
        "--checkpoint.every_n_train_steps", args.steps, "--checkpoint.keep_every_n_steps", args.steps,
        "--model.optimizer.warmup_steps", last // 4)), *rest]


def check(args: argparse.Namespace, others: list[str]) -> None:
    """ValueError for what the runs would refuse, or what would make them other runs than those compared.

    Args:
        args: those of recipes.strategies.
        others: a person's for recipes.pretrain, put after the comparison's own.
    """
    commands, numbers = [command(args, [], name) for name in args.strategies], [ranks(args, n) for n in args.strategies]
    own = OWN | {word for word in commands[0] if word.startswith("--")} - FREE
    for name in (word.split("=")[0] for word in others if word.startswith("-")):
        if any(key.startswith(name) or name.startswith(f"{key}.") for key in own):  # a key, its start, a part of it
            raise ValueError(f"{name} is set by recipes.strategies, the same for all runs: leave it out; --steps and "
                             "--more say how long, --strategies and --devices on what, --out where")
    runs = [Configuration(arguments([*one, *others]), save_config_callback=None) for one in commands]
    cli = runs[0]
    config, there = cli.config.as_dict(), CUDAAccelerator.auto_device_count()
    accelerator = config["trainer"]["accelerator"]
    most = 1 if args.one_gpu else max(numbers)
    gpus = accelerator in ("gpu", "cuda") or (accelerator == "auto" and there > 0)
    if gpus and most > there:
        mend = f"give --devices {there}, or --one_gpu" if there else "add --trainer.accelerator cpu"
        raise ValueError(f"trainer.accelerator is {accelerator} and --devices asks for {count(most, 'GPU')}, this "
                         f"machine has {there}: {mend}, or start it where they are")
    check_machine(config["trainer"])
    for run, number in zip(runs, numbers):
        check_run(run, number, gpus, store=False)
        run.datamodule.batch_plan(number)


def claim(folder: Path, setting: dict, files: list[Path]) -> bool:
    """Make `folder` the place of runs of this setting; whether it is so only now. ValueError where it is another's.

    files: configurations that the runs are made of; one that has changed since makes the setting another one.
    """
    note, found, digests = folder / "setting.json", {}, {}
    here = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    if not (new := not note.exists()):
        try:
            digests = dict((found := json.loads(note.read_text())).pop("files"))
        except (ValueError, AttributeError, TypeError, KeyError):
            raise ValueError(f"{note} does not say what the runs beside it were made of: expected a JSON object of an "
                             "earlier call; give another --out, or move it away with its runs") from None
        apart = [f"{key} {found.get(key)!r} there and {setting.get(key)!r} here"
                 for key in sorted(found.keys() | setting.keys()) if found.get(key) != setting.get(key)]
        apart += [f"the file {name} has changed since" for name, digest in here.items()
                  if digests.get(name, digest) != digest]
        if apart:
            raise ValueError(f"{folder} holds the runs of another call ({', '.join(apart)}): give another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--out {folder} is a file, or lies under one: name a folder") from None
    write_aside(note, json.dumps(setting | {"files": digests | here}, indent=1))
    return new
