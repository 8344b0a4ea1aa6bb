"""How a recipe answers bad input: one message, exit code 2, no traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bad_input() -> Iterator[None]:
    """Around a recipe's set-up, before any work: input that cannot be used ends the process with its message."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
