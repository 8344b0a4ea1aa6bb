"""The files of checkpoints that are whole or not there: written aside, renamed, and marked complete last.

`step=000500.ckpt` (a file, or a folder under DeepSpeed) counts as saved once `step=000500.ckpt.complete` lies beside
it: a JSON object with the step, the size in bytes, a checksum of each file and, once validated, the score. A neutral
checkpoint (`step=000500.neutral`, see `vla_lm.neutral`) has its marker inside, `complete.json`, so that its folder can
be copied as it is; the configuration and results that lie in it too are no part of what the marker counts.
Lightning's own saving moves a temporary file into place, which is a plain copy when the temporary folder is another
file system, and DeepSpeed writes its folder in place; so neither alone tells a whole checkpoint from half of one.
"""

import json
import math
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_BLOCK = 1 << 24  # bytes read at once


def beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def is_neutral(path: str | Path) -> bool:
    """Whether `path` is (or is to be) the folder of a neutral checkpoint."""
    path = Path(path)
    return path.name.removesuffix(".partial").endswith(".neutral") or (path / "state.json").is_file()


def marker_of(path: Path) -> Path:
    """Where the completeness marker of a checkpoint lies."""
    return path / "complete.json" if is_neutral(path) else beside(path, ".complete")


def run_config(path: Path) -> Path | None:
    """The config.yaml of a checkpoint's run: in the run's folder or, outside, taken along in a neutral checkpoint."""
    found = [path / "config.yaml", path.parent.parent / "config.yaml"]
    if path.parent.name == "checkpoints":
        found.reverse()
    return next((config for config in found if config.is_file()), None)


def last_config(run_dir: Path, step: float = math.inf) -> Path:
    """The configuration that a run has at a step: config.yaml, or what a resume changed and kept beside it.

    Of several starts at or before the step the last one counts. environment.json names the file of each.
    """
    path = run_dir / "config.yaml"
    try:
        starts = json.loads((run_dir / "environment.json").read_text())
        names = [start.get("config", path.name) for start in starts if (start["resumed_step"] or 0) <= step]
        last = run_dir / names[-1]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return path  # what is wrong with environment.json is said where the run begins
    return last if last.is_file() else path


def size(path: Path) -> int:
    """Bytes of a file, or of a checkpoint's files in a folder, its marker apart."""
    return sum(file.stat().st_size for file in _files(path).values())


def checksums(path: Path) -> dict[str, int]:
    """CRC-32 of each file of a checkpoint by its path within it ("." for a checkpoint that is one file)."""
    return {name: file_checksum(file) for name, file in _files(path).items()}


def file_checksum(path: str | Path) -> int:
    """CRC-32 of a file's bytes: the cheap check that finds what a disk or a copy has changed."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a checkpoint, file or folder, its marker first; what is not there is no error."""
    for marker in (marker_of(path), beside(marker_of(path), ".partial")):
        marker.unlink(missing_ok=True)
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def write_marker(path: Path, marker: dict[str, Any]) -> None:
    """Writes the marker of the checkpoint at `path`, whole or not at all."""
    aside = beside(marker_of(path), ".partial")
    try:
        with open(aside, "w") as file:
            json.dump(marker, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    os.replace(aside, marker_of(path))
    sync(marker_of(path).parent)


def publish(aside: Path, path: Path, marker: dict[str, Any]) -> None:
    """Gives the finished checkpoint at `aside` its name, and its marker last; killed in between, it has no marker.

    Where the disk has no room for the marker, the checkpoint is removed, so that it does not hold the space.

    Args:
        marker: what the marker is to say beside the size: "step", and "crc32" where the checksums are known already.
    """
    for file in [aside, *aside.rglob("*")]:
        sync(file)
    marker = {"step": marker["step"], "bytes": size(aside), "crc32": marker.get("crc32") or checksums(aside)} | marker
    inside = is_neutral(aside)
    if inside:  # its marker moves with it, in one rename
        write_marker(aside, marker)
    remove(path)  # one of the same step, half-written by a run that was killed
    os.replace(aside, path)
    sync(path.parent)
    if not inside:
        try:
            write_marker(path, marker)
        except OSError:
            remove(path)
            raise


def read_marker(path: str | Path, verify: bool = False) -> dict[str, Any]:
    """What the marker of a checkpoint says: {"step", "bytes", "crc32", "score"}, the last where it was validated.

    Args:
        verify: read every file and compare its checksum too; without it sizes alone are compared.

    Raises:
        ValueError: there is no whole checkpoint at `path`; the message says what is wrong with it.
    """
    path = Path(path).resolve()  # last.ckpt is a link
    marker, wrong = _judged(path, verify)
    if wrong:
        raise ValueError(f"Checkpoint {path} {wrong}. Use another one in {path.parent}, or the run's folder, "
                         "which picks the newest whole one.")
    return marker


def _judged(path: Path, verify: bool) -> tuple[dict[str, Any], str | None]:
    # What its marker says, and what is wrong with it.
    marker = {}
    try:
        marker = json.loads(marker_of(path).read_text())
        _check_marker(marker)
        wrong = None if size(path) == marker["bytes"] else f"has {size(path)} bytes, its marker says {marker['bytes']}"
        if verify and not wrong:  # markers of older versions have no checksums
            found = checksums(path) if "crc32" in marker else {}
            damaged = [name for name in found | marker.get("crc32", {}) if found.get(name) != marker["crc32"].get(name)]
            file = "it" if damaged == ["."] else ", ".join(damaged[:3])
            wrong = f"is damaged: the bytes of {file} are not those that were written (checksum)" if damaged else None
    except FileNotFoundError:
        missing = f"has no marker {marker_of(path).name}, so it was not written to the end"
        wrong = missing if path.exists() else "does not exist"
    except (UnicodeDecodeError, json.JSONDecodeError):
        wrong = f"has an unreadable marker {marker_of(path).name}: it is no JSON in UTF-8"
    except TypeError as error:
        wrong = f"has an unreadable marker {marker_of(path).name}: {error}"
    return marker, wrong


def _check_marker(marker: Any) -> None:
    # TypeError where what it says is not of the kind that `read_marker` promises.
    if not isinstance(marker, dict):
        raise TypeError("expected an object with step and bytes")
    for key in ("step", "bytes"):
        if type(value := marker.get(key)) is not int or value < 0:
            raise TypeError(f"{key} is {value!r}, expected a whole number")
    if not isinstance(sums := marker.get("crc32", {}), dict):
        raise TypeError(f"crc32 is {sums!r}, expected a number for each file")
    if type(score := marker.get("score", 0.0)) not in (int, float):
        raise TypeError(f"score is {score!r}, expected a number")


def step_of(path: Path) -> int:
    """The step in a checkpoint's name, -1 where there is none."""
    found = re.match(r"step=(\d+)", path.name)
    return int(found[1]) if found else -1


def complete_checkpoints(folder: str | Path, kinds: tuple[str, ...] = ("ckpt",)) -> dict[Path, dict[str, Any]]:
    """The whole checkpoints in a folder, oldest first, with what their markers say; the others are passed over."""
    found = {}
    for path in _candidates(folder, kinds):
        try:
            found[path] = read_marker(path)
        except ValueError:
            pass
    return found


def newest_complete(folder: str | Path, verify: bool = False) -> Path | None:
    """The newest whole checkpoint of a checkpoints folder or of a run folder; None when there is none.

    Says (a warning on rank 0) which half-written or damaged ones it passes over, and why. At one step the run's own
    form comes before the neutral one.

    Args:
        verify: compare checksums too, so that damage at equal size is found; reads the whole checkpoint.
    """
    folder = Path(folder)
    inner, passed = folder / "checkpoints", []
    for path in reversed(_candidates(inner if inner.is_dir() else folder, ("neutral", "ckpt"))):
        if not (wrong := _judged(path.resolve(), verify)[1]):
            break
        passed.append(f"{path.name} {wrong}")
    else:
        path = None
    if passed:
        rank_zero_warn(f"Passed over in {folder}: {'; '.join(passed)}; "
                       + (f"taken instead: {path.name}" if path else "there is no whole checkpoint"))
    return path


def _candidates(folder: str | Path, kinds: tuple[str, ...]) -> list[Path]:
    found = [path for kind in kinds for path in Path(folder).glob(f"step=*.{kind}") if step_of(path) >= 0]
    return sorted(found, key=step_of)  # stable: of one step, the later kind last


def _files(path: Path) -> dict[str, Path]:
    if not path.is_dir():
        return {".": path}
    if is_neutral(path):  # a person may edit the configuration in it, and results are written beside it
        found = (file for file in sorted(path.iterdir())
                 if ".safetensors" in file.suffixes or file.name == "state.json")
    else:
        found = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {file.relative_to(path).as_posix(): file for file in found}
