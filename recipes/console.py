"""How a recipe speaks to the person who started it."""

import re
import sys
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from yaml import YAMLError

from recipes.room import no_room
from vla_lm.checkpoint_files import last_config, run_config, step_of

DEFAULT_CONFIG = Path(__file__).parents[1] / "configs/mqar.yaml"


def arguments(argv: list[str]) -> list[str]:
    """Files before keys, whatever their order. Without --config: the resumed run's or export's, or the main job's."""
    word = [text.split("=")[0] for text in argv]
    # What stands below a field is its help; read only for that, as it takes 0.2 to 0.4 s.
    set_parsing_settings(docstring_parse_attribute_docstrings=any(name.endswith("help") for name in word))
    files = {j for i, name in enumerate(word) if name in ("--config", "-c") for j in (i, i + ("=" not in argv[i]))}
    if files or {"--help", "-h"} & set(word):
        return [argv[i] for i in sorted(range(len(argv)), key=lambda i: i not in files)]
    named = [Path(text.split("=", 1)[1] if "=" in text else value) for key in ("--run_dir", "--resume")  # in this order
             for name, text, value in zip(word, argv, [*argv[1:], ""]) if name == key]
    configs = (_config_at(path) if path.parent.name == "checkpoints" else last_config(path) for path in named)
    return ["--config", str(next((path for path in configs if path and path.exists()), DEFAULT_CONFIG)), *argv]


def _config_at(checkpoint: Path) -> Path | None:
    step, run_dir = step_of(checkpoint.resolve()), checkpoint.parent.parent  # last.ckpt is a link
    known = step >= 0 and (run_dir / "config.yaml").is_file()
    return last_config(run_dir, step) if known else run_config(checkpoint)


def refuse_nulls(parser: ArgumentParser, config: Namespace) -> None:
    """TypeError for a null where a key takes none: to jsonargparse it is a key not given, which it does not check."""
    set_parsing_settings(unset_sentinel=True)  # what is not given is marked otherwise: null is a value
    try:
        parser.validate(config)
    finally:
        set_parsing_settings(unset_sentinel=False)


@contextmanager
def bad_input() -> Iterator[None]:
    """Around a recipe's set-up, before any work: unusable input ends the process with its message, exit code 2."""
    try:
        yield
    except (ArgumentError, MisconfigurationException, ValueError, TypeError, OSError, ImportError, YAMLError) as error:
        said = no_room(error) or "; ".join([plain(str(error)), *getattr(error, "__notes__", [])])
        print(f"error: {said}", file=sys.stderr)
        sys.exit(2)


def plain(message: str) -> str:
    """What jsonargparse says of a value, without the classes it tried on the way: the key and what fits there.

    A message of the project's own comes back as it is.
    """
    keys = dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message))
    reasons = re.split(r"\n\s*- ", message.split("Errors:\n")[-1].split("Given value type")[0])
    reasons = [" ".join(reason.strip().removeprefix("- ").split()) for reason in reasons]
    # Of a union's reasons the one that a class gave says more than that the value is no text.
    reason = next((reason for reason in reasons if not reason.startswith("Expected a")), reasons[0])
    kinds = dict.fromkeys(re.findall(r"Expected an? ((?:(?!\. Got value|\n).)+)", message))
    kinds.pop("<class 'NoneType'>", None)
    if keys and kinds and "Expected a" in reason:
        names = [re.sub(r"<class '(\w+)'>", r"\1", re.sub(r"typing.Literal\[(.*)\]", r"\1", kind)) for kind in kinds]
        value = re.search(r"(?:Got value|Given value): (.*)", message)
        if value and (nested := re.match(r"NestedArg\(key='([^']+)'", value[1])):
            key = next(iter(keys))
            return (f"{key}.{nested[1]}: {key} has no class yet that takes it: name one before, with --{key} CLASS or "
                    "in a file given by --config")
        shown = value and ("null" if value[1] == "None" else value[1])
        return f"{'.'.join(keys)}: expected {' or '.join(names)}" + (f", got {shown}" if shown else "")
    if message.startswith("Unexpected config: "):
        return f"a group of a configuration is empty: give it keys, or leave it out\n{message[19:].rstrip()}"
    if "Errors:\n" not in message:
        return message
    reason = re.sub(r"Problem with given class_path '\S+': ", "", reason)
    return f"{next(iter(keys))}: {reason}" if keys else reason
