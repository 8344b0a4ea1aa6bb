"""What a key that there is none of may have meant."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

LISTED = "python -m recipes.pretrain --print_config lists every key"


def nearest_key(message: str, parser: ArgumentParser) -> str | None:
    """A sentence behind what jsonargparse says of an unknown key: the nearest ones there are; None for other messages.

    Known are the command line's keys, and those in the shipped configurations, for what a chosen class takes.
    """
    found = re.search(r"unrecognized arguments: --([\w.]+)|[Oo]ption '([\w.]+)'", message)
    if found is None:
        return None
    wrong = found[1] or found[2]
    known = {option.removeprefix("--") for option in parser._option_string_actions if option.startswith("--")}
    for path in sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml")):
        known.update(_keys(yaml.safe_load(path.read_text())))
    parent = re.search(r'Parser key "([^"]+)"', message)
    if parent and f"{parent[1]}.{wrong}" in known:
        return f"another class of {parent[1]} takes it, not the one chosen. {LISTED}"
    same = sorted(key for key in known if key.rpartition(".")[2] == wrong)
    leaves = {key.rpartition(".")[2]: key for key in sorted(known, reverse=True)}
    near = same or get_close_matches(wrong, known, 2, 0.8)
    near = near or [leaves[leaf] for leaf in get_close_matches(wrong.rpartition(".")[2], leaves, 1, 0.7)]
    return f"did you mean {' or '.join(near[:2])}? {LISTED}" if near else LISTED


def _keys(config: dict[str, Any], before: str = "") -> Iterator[str]:
    # As a command line has them, where the arguments of a class stand beside it.
    for name, value in config.items():
        key = before + name
        yield key
        if isinstance(value, dict):
            yield from _keys(value, before if name == "init_args" else f"{key}.")
