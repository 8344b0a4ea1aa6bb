"""What a recipe says where there is no room, no memory, or less than was asked for."""

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from data.token_store import usable_cores
from recipes import prepare
from recipes.evaluated import in_memory
from recipes.room import no_room
from recipes.virtual_nodes import environment
from vla_lm.checkpoint_files import newest_complete, write_marker

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_place_that_cannot_be_written_to(number, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(number, "words of the system", str(tmp_path / "stores/.books.lock"))

    monkeypatch.setattr(prepare, "prepare_store", full)
    assert prepare.main(["--source", str(tmp_path), "--out", str(tmp_path / "stores/books")]) == 2
    assert (f"error: cannot write in {tmp_path / 'stores'}: words of the system. Make room, or name another place "
            "with --out") in capsys.readouterr().err


def test_other_errors_keep_their_words():
    assert no_room(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None and no_room(ValueError("x")) is None
    assert no_room(OSError(errno.ENOSPC, "full")) == "cannot write: full. Make room, or name another place"


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
])
def test_a_cell_that_is_too_large(error, capsys):
    with pytest.raises(SystemExit) as end, in_memory(64, 500_000):
        raise error
    assert end.value.code == 3
    assert "stopped: not enough memory for 64 rows of 500,000 tokens at once: give a smaller --batch_rows" in (
        capsys.readouterr().err)
    with pytest.raises(RuntimeError, match="something else"), in_memory(64, 64):
        raise RuntimeError("something else")


def test_the_checkpoint_that_is_taken_instead_is_named(tmp_path):
    for step in (1, 2):
        path = tmp_path / f"step=00000{step}.ckpt"
        path.write_bytes(bytes(8))
        write_marker(path, {"step": step, "bytes": 4 * step})
    (tmp_path / "step=000001.ckpt").write_bytes(bytes(4))
    (tmp_path / "step=000002.ckpt").write_bytes(bytes(5))
    with pytest.warns(UserWarning, match="step=000002.ckpt has 5 bytes, its marker says 8; taken instead: step=000001"):
        assert newest_complete(tmp_path) == tmp_path / "step=000001.ckpt"
    (tmp_path / "step=000001.ckpt").unlink()
    with pytest.warns(UserWarning, match="Passed over .*says 8; there is no whole checkpoint"):
        assert newest_complete(tmp_path) is None


def test_a_warning_is_one_line():
    script = ("import warnings; from recipes.notices import quiet_notices; quiet_notices()\n"
              "from lightning.pytorch.utilities.rank_zero import rank_zero_warn\n"
              "from callbacks.retention import monitored; monitored({'val/loss': 1}, 'val/los'); "
              "warnings.warn_explicit('theirs', UserWarning, '/somewhere/else.py', 7)")
    done = subprocess.run([sys.executable, "-W", "default", "-c", script], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)
    said = [line for line in done.stderr.splitlines() if "val/los" in line or "theirs" in line]
    assert said[0].startswith("warning: checkpoint.monitor 'val/los'") and said[1] == (
        "/somewhere/else.py:7: UserWarning: theirs"), done.stderr
    assert warnings.formatwarning("x", UserWarning, "f", 1).startswith("f:1"), "of this process as it was"


def test_virtual_nodes_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    assert [environment(0, nodes, 1)["OMP_NUM_THREADS"] for nodes in (2, 3, 16)] == ["4", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment(0, 2, 1)["OMP_NUM_THREADS"] == "5"
    monkeypatch.delattr("os.sched_getaffinity")  # as on macOS
    assert usable_cores() == os.cpu_count()
