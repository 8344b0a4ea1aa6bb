"""Room for a run's checkpoints: which stay, and which make way."""

import os
import shutil
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from callbacks.together import CheckpointError, agree
from vla_lm.checkpoint_files import beside, complete_checkpoints, marker_of, read_marker, remove, step_of, write_marker


def prune(folder: Path, keep_last: int, keep_best: int, keep_every: int | None, mode: str) -> list[Path]:
    """Removes the others and what a killed save left half-written; the best by their markers' scores, best first.

    A neutral checkpoint that a person exported stays; one that a resume made goes with the checkpoint it was made of.

    Args:
        mode: "min" or "max": which score is best.
    """
    found = complete_checkpoints(folder)
    scored = sorted((path for path in found if "score" in found[path]), key=lambda path: found[path]["score"])
    best = (scored if mode == "min" else scored[::-1])[:keep_best]
    for path in list(found)[:-keep_last]:
        if path not in best and not (keep_every and step_of(path) % keep_every == 0):
            remove(path)
    for path, marker in complete_checkpoints(folder, kinds=("neutral",)).items():
        if marker.get("made_for") == "resume" and not path.with_suffix(".ckpt").exists():
            remove(path)
    for stray in folder.glob("*.ckpt*.partial"):  # not those of an export that is being written now
        remove(stray)
    return best


def make_room(trainer: Trainer, aside: Path) -> None:
    """Clears the place of the checkpoint to be written; OSError where the newest one's size does not fit again."""
    aside.parent.mkdir(parents=True, exist_ok=True)
    remove(aside)
    sizes = [marker["bytes"] for marker in complete_checkpoints(aside.parent).values()]
    if sizes and shutil.disk_usage(aside.parent).free < sizes[-1]:
        raise OSError(f"it needs about {sizes[-1] / 1e6:,.1f} MB")
    if hasattr(trainer.strategy, "deepspeed_engine"):  # else DeepSpeed does it between two collectives
        (aside / "checkpoint").mkdir(parents=True)


def monitored(metrics: dict[str, Any], monitor: str) -> float | None:
    """The metric that ranks checkpoints, if it is finite; if none has that name, a warning names those there are."""
    if monitor not in metrics:
        there = ", ".join(sorted(name for name in metrics if name.startswith("val/"))) or "none"
        rank_zero_warn(f"checkpoint.monitor {monitor!r} is no metric of this run's validation, so no checkpoint is "
                       f"kept as a best one: use one of {there}")
    score = metrics.get(monitor)
    return float(score) if score is not None and isfinite(score) else None


def note_score(path: Path, score: float, prune: Callable[[], Any]) -> None:
    """Writes a checkpoint's score into its marker, then prunes; a warning where the file system refuses."""
    try:
        write_marker(path, read_marker(path) | {"score": score})
        prune()
    except OSError as error:
        rank_zero_warn(f"{path} cannot be one of the best: its score was not written ({error})")


def set_aside_later(trainer: Trainer, folder: Path) -> None:
    """Renames whole checkpoints of later steps to ….superseded: the run will write its own. All ranks call it.

    Raises:
        CheckpointError: on all ranks, where they cannot be renamed.
    """
    step = trainer.global_step
    _, problem = agree(trainer, lambda: trainer.is_global_zero and _set_aside_after(folder, step))
    if problem is not None:
        raise CheckpointError(f"Checkpoints in {folder} of steps after {step} cannot be renamed: {problem}. Make the "
                              "folder writable, or go on in another one (--run_dir).")


def _set_aside_after(folder: Path, step: int) -> None:
    for path, marker in complete_checkpoints(folder, kinds=("neutral", "ckpt")).items():
        if marker["step"] > step:
            superseded = beside(path, ".superseded")
            rank_zero_warn(f"Training starts from step {step}: set aside as {superseded}")
            remove(superseded)
            if path.suffix == ".ckpt":
                marker_of(path).unlink()
            os.replace(path, superseded)
