"""How a recipe speaks to the person who started it."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Notices of libraries about their own affairs, which a person who trains can do nothing about.
_NOTICES = ("litlogger", "`weights_only` was not set", "isinstance(treespec, LeafSpec)", "does not have many workers",
            "torch.jit.script", "TPU available", "JsonargparseDeprecationWarning")


@contextmanager
def bad_input() -> Iterator[None]:
    """Around a recipe's set-up, before any work: input that cannot be used ends the process with its message, exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


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
        warnings.filterwarnings("ignore", message=f".*{notice}".replace("(", r"\(").replace(")", r"\)"))
