"""What all ranks do together succeeds on all of them or ends all of them with one error."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from vla_lm.checkpoint_files import remove


class CheckpointError(OSError):
    """A checkpoint could not be written; the older ones are untouched."""


def agree(trainer: Trainer, action: Callable[[], Any]) -> tuple[Any, Exception | str | None]:
    """What the action gives, and why it failed: here, the error; on another rank, a word; nowhere, None.

    All ranks call it.
    """
    problem, result = None, None
    try:
        result = action()
    except (OSError, RuntimeError) as error:
        problem = error
    succeeded = trainer.strategy.reduce_boolean_decision(problem is None)
    return result, problem if succeeded else problem or "another rank failed"


def together(trainer: Trainer, aside: Path, action: Callable[[], Any]) -> Any:
    """What the action, a part of writing the checkpoint at ``aside``, gives. All ranks call it.

    Raises:
        CheckpointError: on all ranks, where it fails on one; what was written of the checkpoint is removed.
    """
    result, problem = agree(trainer, action)
    if problem is not None:
        left = shutil.disk_usage(aside.parent).free if aside.parent.exists() else 0
        if trainer.is_global_zero:
            remove(aside)
        raise CheckpointError(
            f"Could not save {aside.with_suffix('')}: {problem} ({left / 1e6:,.1f} MB "
            "were left on the disk). The older checkpoints there are untouched: free some space, then resume."
        ) from (problem if isinstance(problem, Exception) else None)
    return result
