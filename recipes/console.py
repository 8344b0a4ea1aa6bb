"""How a recipe speaks to the person who started it."""

import logging
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.exceptions import MisconfigurationException

# Notices of libraries about their own affairs, which a person who trains can do nothing about.
_NOTICES = ("litlogger", "`weights_only` was not set", "isinstance(treespec, LeafSpec)", "does not have many workers",
            "torch.jit.script", "TPU available", "It is recommended to use `self.log(", "smaller than the logging interval")


@contextmanager
def bad_input() -> Iterator[None]:
    """Around a recipe's set-up, before any work: input that cannot be used ends the process with its message, exit code 2."""
    try:
        yield
    except (ArgumentError, MisconfigurationException, ValueError, OSError) as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        sys.exit(2)


def plain(message: str) -> str:
    """What jsonargparse says of a value, without the types it tried on the way: the key and the first reason.

    A message of the project's own comes back as it is.
    """
    if "Errors:\n" not in message:
        return message
    key = re.search(r'Parser key "([^"]+)"', message)
    reasons = re.split(r"\n\s*- ", message.split("Errors:\n")[1].split("Given value type")[0])
    reason = " ".join(reasons[0].strip().removeprefix("- ").split())
    if "is not accepted" in reason:
        reason += "; python -m recipes.pretrain --print_config lists every key"
    return f"{key[1]}: {reason}" if key else reason


@contextmanager
def stopped_by(*errors: type[Exception]) -> Iterator[None]:
    """Around a run: these errors say all there is to say, so the process ends with their message alone, exit code 3."""
    try:
        yield
    except errors as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(3)


def quiet_notices() -> None:
    """Leave the libraries' notices about themselves out of the output; warnings about the run stay."""
    def wanted(record: logging.LogRecord) -> bool:
        return not any(notice in record.getMessage() for notice in _NOTICES)

    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.trainer.connectors.checkpoint_connector",
                 "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(wanted)
    for notice in _NOTICES:
        warnings.filterwarnings("ignore", message=f"(?s).*{re.escape(notice)}")
