"""Whether runs can be compared: what they are asked, the machine they are for, and what lies in their folder."""

import hashlib
import json
from pathlib import Path

from lightning.pytorch.accelerators import CUDAAccelerator

from callbacks.run_folder import write_aside
from recipes.cluster import check_machine
from recipes.console import arguments
from recipes.dry_run import Configuration, check_run
from recipes.planning import count

# Options of a run that are the comparison's own, beside those it puts into a command.
OWN = {"--config", "-c", "--run_dir", "--resume", "--trainer.strategy"}
FREE = {"--model.optimizer.warmup_steps"}  # a start that may be another


def check(command: list[str], others: list[str], ranks: list[int]) -> None:
    """ValueError for what the runs would refuse, or what would make them other runs than those compared.

    Args:
        command: arguments of recipes.pretrain that the comparison makes itself, for the first run.
        others: those of the person, put after them.
        ranks: processes of each run.
    """
    own = OWN | {word for word in command if word.startswith("--")} - FREE
    for name in (word.split("=")[0] for word in others if word.startswith("-")):
        if any(key.startswith(name) or name.startswith(f"{key}.") for key in own):  # a key, its start, a part of it
            raise ValueError(f"{name} is set by recipes.strategies, the same for all runs: leave it out; --steps and "
                             "--more say how long, --strategies and --devices on what, --out where")
    cli = Configuration(arguments([*command, *others]), save_config_callback=None)
    config, there, most = cli.config.as_dict(), CUDAAccelerator.auto_device_count(), max(ranks)
    accelerator = config["trainer"]["accelerator"]
    gpus = accelerator in ("gpu", "cuda") or (accelerator == "auto" and there > 0)
    if gpus and most > there:
        mend = f"give --devices {there}" if there else "add --trainer.accelerator cpu"
        raise ValueError(f"trainer.accelerator is {accelerator} and --devices asks for {count(most, 'GPU')}, this "
                         f"machine has {there}: {mend}, or start it where they are")
    check_machine(config["trainer"])
    check_run(cli, ranks[0], gpus, store=False)
    for number in {*ranks}:
        cli.datamodule.batch_plan(number)


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
