"""The rank at fault is named, not those that follow from it; and the batch scripts are bash that parses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "slurm"
LOST = "stopped: another rank has ended, or hangs; its own log says why (Connection closed by peer)"


def failure(folder: Path, logs: dict[int, str], errors: dict[int, tuple[int, str]] | None = None):
    """What is said of these logs, and the exit code."""
    for rank, text in logs.items():
        (folder / f"rank-{rank}.log").write_text(text)
    for rank, (time, trace) in (errors or {}).items():
        record = {"message": {"message": "E", "extraInfo": {"py_callstack": trace, "timestamp": str(time)}}}
        (folder / f"rank-{rank}.error.json").write_text(json.dumps(record))
    command = [sys.executable, SLURM / "first_failure.py", folder]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    return done.stdout, done.returncode


def test_the_earliest_traceback_counts(tmp_path):
    (tmp_path / "rank-5.error.json").write_text('{"mess')  # of a rank that was killed while it wrote
    errors = {2: (1030, "late"), 10: (1020, "Traceback\nKeyError: 'x'")}
    said, code = failure(tmp_path, {0: LOST, 10: "", 2: ""}, errors)
    assert said.startswith("rank 10 failed first (2 failed in all)") and said.endswith("Traceback\nKeyError: 'x'\n")
    assert str(tmp_path / "rank-10.log") in said and code == 1


def test_a_message_is_repeated_once_with_its_ranks(tmp_path):
    found = failure(tmp_path, {0: LOST, 1: "step 3\nstopped: no batch came", 2: "stopped: no batch came"})
    assert found == ("rank 1, 2: stopped: no batch came\n", 3)


def test_refused_input_is_told_from_the_ranks_that_srun_ended(tmp_path):
    assert failure(tmp_path, {0: "", 1: "error: no such store"}) == ("rank 1: error: no such store\n", 2)


def test_a_rank_without_a_word_is_named(tmp_path):
    said, code = failure(tmp_path, {0: LOST, 1: "step 3/10\n", 2: LOST})
    assert said.startswith("rank 1 left no word: killed from outside") and code == 0


@pytest.mark.parametrize("script", sorted(SLURM.glob("*.s*")), ids=lambda path: path.name)
def test_the_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)
