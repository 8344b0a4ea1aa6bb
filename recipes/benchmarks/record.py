"""Results on disk, one entry a measurement, so that a killed run goes on from what it has."""

import ast
import fcntl
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import torch

import kernels
from callbacks.run_folder import environment
from recipes.benchmarks.machine import machine

MEASURING = ("contenders", "decode", "measure", "operators", "peers")  # the modules that decide what a number means


@lru_cache
def code_digest() -> str:
    """Changes when the operator's code does: its measurements are then made again."""
    return digest(sorted(Path(kernels.__file__).parent.glob("*.py")))


@lru_cache
def method_digest() -> str:
    """Changes when the way of measuring does: every measurement is then made again."""
    return digest(Path(__file__).with_name(f"{name}.py") for name in MEASURING)


def digest(files: Iterable[Path]) -> str:
    """12 hexadecimal digits of what Python files do: comments, docstrings and layout do not count."""
    found = hashlib.sha256()
    for file in files:
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                del node.body[0]
        found.update(ast.dump(tree).encode())
    return found.hexdigest()[:12]


def setting(dtype: torch.dtype, device: torch.device) -> dict:
    """The part of every measurement's key that is the same in one run."""
    return {"dtype": str(dtype).removeprefix("torch."), **machine(device), "method": method_digest()}


def commit() -> str | None:
    """The checkout's commit, with " (dirty)" behind it where tracked code differs from it; None where there is none."""
    git = environment()["git"]
    changed = any(line.endswith(".py") and not line.startswith("??") for line in git["changed_files"] or [])
    return git["commit"] and git["commit"] + " (dirty)" * changed


class Record:
    """A JSON file {"report": {table: its rows}, "results": [{...what was measured, "commit", "result": numbers}]},
    written whole after every measurement and table. path: the file, in a folder that exists.

    Raises ValueError where the file is another, or another process writes to it. Ends the process (exit code 3) where
    it cannot be written any more.
    """

    def __init__(self, path: Path):
        self.path, self.commit, self.report, self.entries = path, commit(), {}, []
        self._lock = open(path.with_name(f".{path.name}.lock"), "w")  # held until this process ends
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process writes to {path}: wait for it, or give another --out") from None
        if path.exists():
            try:
                found = json.loads(path.read_text())
                # What was refused may have been for want of memory or of a setting: it is tried again.
                self.entries = [entry for entry in found["results"] if "refused" not in entry["result"]]
                # A table without a setting is of an earlier form of this file.
                self.report = {name: table for name, table in found.get("report", {}).items() if "setting" in table}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f"{path} is not a benchmark's record; give another --out or move it away") from None

    def once(self, what: dict, measure: Callable[[], dict]) -> dict:
        """The result of `what`: the recorded one, or a new one, which is recorded. {"refused": why} is not recorded."""
        def key(entry):
            return {name: value for name, value in entry.items() if name not in ("commit", "result")}

        entry = next((entry for entry in self.entries if key(entry) == what), None)
        if entry is not None:
            return entry["result"]
        try:
            result = measure()
        except ImportError as error:
            return {"refused": f"not installed: {error}"}
        if "refused" not in result:
            self.entries.append({**what, "commit": self.commit, "result": result})
            self.save()
        return result

    def add(self, name: str, setting: dict, **table) -> None:
        """A table for the report, in place of an older one of this name; the others stay."""
        self.report[name] = {"setting": {**setting, "commit": self.commit}, **table}
        self.save()

    def save(self) -> None:
        partial = self.path.with_name(f"{self.path.name}.partial")
        try:
            partial.write_text(json.dumps({"report": self.report, "results": self.entries}, indent=1))
            partial.replace(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            print(f"stopped: {self.path} cannot be written ({error.strerror}): mend that and start again, what was "
                  "measured before stays in it", file=sys.stderr)
            sys.exit(3)
