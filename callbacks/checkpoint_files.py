"""The files of checkpoints that are whole or not there: written aside, renamed, and marked complete last.

``step=000500.ckpt`` (a file, or a folder under DeepSpeed) counts as saved once ``step=000500.ckpt.complete`` lies
beside it: a JSON object with the step, the size in bytes and, once validated, the score. Lightning's own saving moves
a temporary file into place, which is a plain copy when the temporary folder is another file system, and DeepSpeed
writes its folder in place; so neither alone tells a whole checkpoint from half of one.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def remove(path: Path) -> None:
    """Removes a checkpoint, file or folder, its marker first; what is not there is no error."""
    beside(path, ".complete").unlink(missing_ok=True)
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def write_marker(path: Path, marker: dict[str, Any]) -> None:
    """Writes the marker of the checkpoint at ``path``, whole or not at all."""
    aside = beside(path, ".complete.partial")
    with open(aside, "w") as file:
        json.dump(marker, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, beside(path, ".complete"))


def publish(aside: Path, path: Path, step: int) -> None:
    """Gives the finished checkpoint at ``aside`` its name, then its marker; killed in between, it has no marker."""
    for file in [aside, *aside.rglob("*")]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    remove(path)  # one of the same step, half-written by a run that was killed
    os.replace(aside, path)
    write_marker(path, {"step": step, "bytes": size(path)})


def read_marker(path: str | Path) -> dict[str, Any]:
    """What the marker of a checkpoint says: ``{"step", "bytes", "score"}``.

    Raises:
        ValueError: there is no whole checkpoint at ``path``; the message says what is wrong with it.
    """
    path = Path(path).resolve()  # last.ckpt is a link
    try:
        marker = json.loads(beside(path, ".complete").read_text())
        wrong = None if size(path) == marker["bytes"] else f"has {size(path)} bytes, not {marker['bytes']}"
    except FileNotFoundError:
        wrong = "has no completeness marker, so it is half-written" if path.exists() else "does not exist"
    except (json.JSONDecodeError, KeyError, TypeError):
        wrong = "has an unreadable completeness marker"
    if wrong:
        raise ValueError(f"Checkpoint {path} {wrong}. Resume from another one in {path.parent}.")
    return marker


def complete_checkpoints(folder: str | Path, warn: bool = False) -> dict[Path, dict[str, Any]]:
    """The whole checkpoints in a folder, oldest first, with what their markers say; the others are passed over."""
    found = {}
    for path in sorted(Path(folder).glob("step=*.ckpt"), key=lambda p: int(re.sub(r"\D", "", p.stem) or 0)):
        try:
            found[path] = read_marker(path)
        except ValueError as error:
            if warn:
                rank_zero_warn(f"Passed over: {error}")
    return found


def newest_complete(folder: str | Path) -> Path | None:
    """The newest whole checkpoint of a checkpoints folder or of a run folder; None when there is none.

    Says (a warning on rank 0) which half-written ones it passes over, and why.
    """
    folder = Path(folder)
    inner = folder / "checkpoints"
    return next(reversed(complete_checkpoints(inner if inner.is_dir() else folder, warn=True)), None)
