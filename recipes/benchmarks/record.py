"""Results on disk, one entry a measurement, so that a killed run goes on from what it has."""

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import kernels


@lru_cache
def code_digest() -> str:
    """Changes when the operator's code does: its measurements are then made again."""
    files = sorted(Path(kernels.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


class Record:
    """A JSON file {"results": [{...what was measured, "result": numbers}], ...}, written whole after every measurement."""

    def __init__(self, path: Path):
        self.path, self.entries = path, []
        if path.exists():
            try:
                self.entries = json.loads(path.read_text())["results"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} is not a benchmark's record; give another --out or move it away") from None
        path.parent.mkdir(parents=True, exist_ok=True)

    def once(self, what: dict, measure: Callable[[], dict]) -> dict:
        """The result of `what`: the recorded one, or a new one, which is recorded. A missing package is not recorded."""
        entry = next((e for e in self.entries if {**e, "result": None} == {**what, "result": None}), None)
        if entry is None:
            try:
                entry = {**what, "result": measure()}
            except ImportError as error:
                return {"refused": f"not installed: {error}"}
            self.entries.append(entry)
            self.save()
        return entry["result"]

    def save(self, **more) -> None:
        """Write the file; `more` stands beside the results: the tables of the last run."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps({**more, "results": self.entries}, indent=1))
        partial.replace(self.path)
