"""A logger that writes the run's curve to one file of JSON lines, ``metrics.jsonl``."""

import json
import math
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class JsonlLogger(Logger):
    """Appends ``{"step": 500, "time": 1767225600.0, "train/loss": 2.1, …}`` lines to ``metrics.jsonl``.

    ``step`` is the number of optimizer steps taken when the numbers were measured (Lightning's loggers, TensorBoard
    among them, call the first step 0, so their axis is one less); ``time`` is in seconds since 1970. A step can have
    several lines. NaN and infinities are written as null, which every JSON reader takes.

    Args:
        save_dir: the run's folder.
        purge_step: the step a resumed run goes on from: later lines of the interrupted run are dropped, so the file
            stays one curve. When not given, the step before the first one logged. Half a line, left by a kill, is
            dropped in any case.
    """

    def __init__(self, save_dir: str | Path, purge_step: int | None = None) -> None:
        super().__init__()
        self._save_dir = Path(save_dir)
        self.purge_step = purge_step
        self._file: Any = None

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self._save_dir)

    @property
    def log_dir(self) -> str:
        return str(self._save_dir)

    @property
    def path(self) -> Path:
        return self._save_dir / "metrics.jsonl"

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's folder has its config."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._file is None:
            self._open(step or 0)
        line = {"step": (step or 0) + 1, "time": round(time.time(), 3)}
        for name, value in metrics.items():
            line[name] = value if math.isfinite(value) else None
        self._file.write(json.dumps(line) + "\n")

    @rank_zero_only
    def save(self) -> None:
        if self._file is not None:
            self._file.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self.purge_step = None, None

    def _open(self, first: int) -> None:
        purge = first if self.purge_step is None else self.purge_step
        self._save_dir.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= purge]
            aside = self.path.with_name(self.path.name + ".partial")
            with open(aside, "w") as file:
                file.writelines(json.dumps(line) + "\n" for line in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.path)
        self._file = open(self.path, "a")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; half a line at the end is passed over.

    Raises:
        ValueError: a line before the last is no JSON object with a step.
    """
    lines, found = Path(path).read_text().splitlines(), []
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if isinstance(line, dict) and "step" in line:
            found.append(line)
        elif number < len(lines):
            raise ValueError(f"{path} line {number} is no JSON object with a step: {text[:80]!r}. Remove that line.")
    return found
