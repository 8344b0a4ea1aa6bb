"""Snapshots are copies in memory that is used again; errors wait for `finish`; an unfit checkpoint is answered."""

import subprocess
import sys
import threading
import zlib
from collections import defaultdict
from typing import NamedTuple

from unittest.mock import Mock

import pytest
import torch
from small import language_model

from vla_lm import checkpoint_io, snapshot
from vla_lm.checkpoint_io import NoNeutralForm, RunCheckpointIO, loadable


class Pair(NamedTuple):
    tensor: torch.Tensor
    number: int


def state(value):
    tied = torch.full((4, 3), float(value))
    half = torch.arange(8.0)[::2] + value  # not contiguous
    more = {"empty": torch.empty(0), "none": torch.empty(0), "pair": Pair(half + 1, 2),
            "ints": defaultdict(list, {"x": [1]})}
    return {"module": {"a": tied, "b": tied, "half": half}, "list": [1, (half, "text")],
            "size": torch.Size([2, 3]), **more}


def save(io, content, path):
    with io.deferred():
        io.save(content, path)


@pytest.mark.parametrize("background", [True, False])
def test_what_was_saved_is_written(tmp_path, background):
    io, content = RunCheckpointIO(background), state(1)
    save(io, content, tmp_path / "step=1.ckpt")
    if background:
        content["module"]["a"].zero_()  # training goes on
        content["pair"].tensor.zero_()
        assert not (tmp_path / "step=1.ckpt").exists()
    io.begin(None)
    assert io.done()
    assert io.finish() == {str(tmp_path / "step=1.ckpt"): zlib.crc32((tmp_path / "step=1.ckpt").read_bytes())}
    again = torch.load(tmp_path / "step=1.ckpt", weights_only=False)
    assert (torch.equal(again["module"]["a"], torch.ones(4, 3))
            and torch.equal(again["list"][1][0], torch.arange(1.0, 9, 2)))
    assert again["module"]["a"].data_ptr() == again["module"]["b"].data_ptr()  # shared as before
    assert torch.equal(again["pair"].tensor, torch.arange(8.0)[::2] + 2) and again["ints"] == {"x": [1]}
    assert again["list"][1][1] == "text" and again["size"] == torch.Size([2, 3])


def test_the_memory_of_a_snapshot_is_used_again(tmp_path):
    io, places = RunCheckpointIO(), []
    for step in range(3):
        for file in ("a", "b"):
            save(io, state(step), tmp_path / f"step={step}.{file}")
        places.append([buffer.data_ptr() for _, buffer in io._memory._lent])
        io.begin(None)
        io.finish()
        assert torch.load(tmp_path / f"step={step}.b", weights_only=False)["module"]["a"][0, 0] == step
    assert places[0] == places[1] == places[2] and len(places[0]) == 6


def test_memory_that_was_reserved_is_used(tmp_path, monkeypatch):
    """Of tensors' sizes, not of their storages': a slice's copy is as large as the slice."""
    io, whole = RunCheckpointIO(), torch.arange(12.0)
    content = {"slice": whole[2:6], "bf16": torch.ones(3, 5, dtype=torch.bfloat16), "scalar": torch.tensor(3),
               "none": torch.empty(0)}
    io.reserve(content.values())
    io.reserve(pytest.fail() for _ in range(1))  # later calls do nothing
    io._memory._reserving.join()
    monkeypatch.setattr(snapshot, "_fresh", lambda *_: pytest.fail("memory was there"))
    save(io, content, tmp_path / "a.ckpt")
    assert io._memory.lent == 16 + 30 + 8
    io.begin(None)
    io.finish()
    again = torch.load(tmp_path / "a.ckpt")
    assert all(torch.equal(again[name], content[name]) for name in content) and io._memory.lent == 0
    assert again["slice"].untyped_storage().nbytes() == 16  # torch.save writes storages


def test_memory_that_cannot_be_reserved_is_asked_for_again(tmp_path, monkeypatch):
    asked = []

    def none_at_first(size, pinned, otherwise=snapshot._fresh):
        asked.append(size)
        if len(asked) == 1:
            raise RuntimeError("cannot allocate memory")
        return otherwise(size, pinned)

    monkeypatch.setattr(snapshot, "_fresh", none_at_first)
    io = RunCheckpointIO()
    io.reserve([torch.ones(2), torch.ones(3)])
    save(io, {"x": torch.ones(2)}, tmp_path / "a.ckpt")
    io.begin(None)
    assert list(io.finish()) == [str(tmp_path / "a.ckpt")] and asked == [8, 8]


def test_a_process_may_end_while_memory_is_got():
    script = ("import sys, torch; from vla_lm.checkpoint_io import RunCheckpointIO; io = RunCheckpointIO(); "
              "io.reserve([torch.empty(50_000_000, device='meta')] * 50); sys.exit(3)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize("large", [True, False])
def test_training_waits_for_a_small_save_alone(tmp_path, monkeypatch, large):
    monkeypatch.setattr(checkpoint_io, "LARGE", 4 if large else 1000)
    held = threading.Event()
    monkeypatch.setattr(RunCheckpointIO, "_write", lambda *_: held.wait(0.3))
    io = RunCheckpointIO()
    save(io, {"x": torch.ones(2)}, tmp_path / "a.ckpt")
    io.begin(20)
    assert io.done() != large
    held.set()
    io.finish()


@pytest.mark.parametrize("background", [True, False])
def test_an_error_waits_for_finish(tmp_path, background):
    io = RunCheckpointIO(background)
    save(io, state(1), tmp_path / "missing" / "step=1.ckpt")
    io.begin(None)
    with pytest.raises(RuntimeError, match="missing"):
        io.finish()
    save(io, state(2), tmp_path / "step=2.ckpt")
    io.begin(None)
    assert list(io.finish()) == [str(tmp_path / "step=2.ckpt")]


def test_what_others_save_is_written_at_once_and_is_not_the_runs(tmp_path):
    io = RunCheckpointIO()
    save(io, state(1), tmp_path / "step=1.ckpt")
    io.save_checkpoint(state(2), tmp_path / "made" / "mine.ckpt")
    assert torch.load(tmp_path / "made" / "mine.ckpt", weights_only=False)["module"]["a"][0, 0] == 2
    io.begin(None)
    assert list(io.finish()) == [str(tmp_path / "step=1.ckpt")]


def test_an_error_between_collectives_waits_for_finish_too():
    io, broken = RunCheckpointIO(), Mock(side_effect=RuntimeError("out of memory"))
    with io.deferred():
        io.guarded(broken)()
    io.begin(None)
    with pytest.raises(RuntimeError, match="out of memory"):
        io.finish()
    with pytest.raises(RuntimeError, match="out of memory"):
        io.guarded(broken)()
    assert io.guarded(Mock(return_value=7))() == 7


def test_one_that_cannot_be_made_neutral_says_why(tmp_path):
    path = tmp_path / "step=000004.ckpt"
    path.mkdir()
    with pytest.raises(NoNeutralForm, match="cannot be turned into the neutral form.*no checkpoint/.model_states.pt"):
        loadable(path, {"form": "file"})
    torch.save({"hyper_parameters": {"config": language_model().config.to_dict(), "optimizer": {}}},
               tmp_path / "file.ckpt")
    assert loadable(tmp_path / "file.ckpt", {"form": "file"}) == tmp_path / "file.ckpt"
