"""A checkpoint is whole or passed over: kills at every point, full disks, pruning, links, resume."""

import json
import os
import resource
import shutil
import signal
import threading
import time
import warnings
import zlib
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks import CheckpointError, JsonlLogger, RunCheckpoint, newest_complete, read_marker, read_metrics
from callbacks import retention
from vla_lm import checkpoint_files, checkpoint_io
from vla_lm.checkpoint_files import complete_checkpoints
from tests.callbacks.tiny import TinyData, TinyModel, trainer


def fit(folder, steps, ckpt_path=None, every=2, accumulation=1, **settings):
    seed_everything(1, verbose=False)
    saver = RunCheckpoint(folder / "checkpoints", every_n_train_steps=every, **settings)
    data = TinyData(step_rows=4, micro=4 // accumulation)
    run = trainer(folder, steps, [saver], val_check_interval=2 * accumulation, accumulate_grad_batches=accumulation)
    run.fit(TinyModel(), datamodule=data, ckpt_path=ckpt_path)
    return run, saver


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_saves_marks_links_and_prunes(tmp_path, accumulation):
    run, saver = fit(tmp_path, 9, accumulation=accumulation, keep_best=0)
    assert names(tmp_path) == ["last.ckpt", "step=000008.ckpt", "step=000008.ckpt.complete", "step=000009.ckpt",
                               "step=000009.ckpt.complete"]  # fmt: skip
    folder = tmp_path / "checkpoints"
    assert (folder / "last.ckpt").is_symlink() and os.readlink(folder / "last.ckpt") == "step=000009.ckpt"
    newest = newest_complete(tmp_path)
    assert newest == newest_complete(folder) == folder / "step=000009.ckpt"
    marker = json.loads((folder / "step=000009.ckpt.complete").read_text())
    assert marker == {"step": 9, "bytes": newest.stat().st_size, "crc32": {".": zlib.crc32(newest.read_bytes())}}
    assert read_marker(folder / "step=000008.ckpt")["score"] == pytest.approx(run.callback_metrics["val/loss"].item())
    assert torch.load(newest, weights_only=False)["global_step"] == 9


@pytest.mark.parametrize("mode, pick", [("min", min), ("max", max)])
def test_keeps_the_best(tmp_path, mode, pick):
    _, every = fit(tmp_path / "all", 10, keep_last=99)
    found = checkpoint_files.complete_checkpoints(tmp_path / "all" / "checkpoints")
    scores = {path.name: marker["score"] for path, marker in found.items()}
    best = pick(scores, key=scores.get)
    assert len(scores) == 5
    _, saver = fit(tmp_path / "run", 10, keep_last=1, keep_best=1, mode=mode)
    kept = {name for name in names(tmp_path / "run") if name.endswith(".ckpt")} - {"last.ckpt"}
    assert kept == {best, "step=000010.ckpt"} and saver.best_model_path.endswith(best)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_goes_on_as_if_never_stopped(tmp_path, accumulation):
    whole, _ = fit(tmp_path / "whole", 8, accumulation=accumulation)
    fit(tmp_path / "parts", 4, accumulation=accumulation)
    first = newest_complete(tmp_path / "parts")
    written = first.stat().st_mtime_ns
    torch.manual_seed(5)
    run, _ = fit(tmp_path / "parts", 8, ckpt_path=first, accumulation=accumulation, keep_last=9)
    assert first.stat().st_mtime_ns == written  # not saved a second time, in the middle of an accumulation
    assert run.global_step == 8 and read_marker(newest_complete(tmp_path / "parts"))["step"] == 8


def test_a_half_written_one_is_passed_over_with_a_word(tmp_path):
    fit(tmp_path, 8, keep_last=4)
    folder = tmp_path / "checkpoints"
    (folder / "step=000008.ckpt.complete").unlink()
    with open(folder / "step=000006.ckpt", "r+b") as file:
        file.truncate(100)
    (folder / "step=000004.ckpt.complete").write_text('{"step": 4, "by')
    with pytest.warns(UserWarning) as said:
        assert newest_complete(tmp_path) == folder / "step=000002.ckpt"
    text = " ".join(str(warning.message) for warning in said)
    assert ("000008.ckpt has no marker step=000008.ckpt.complete" in text
            and "000006.ckpt has 100 bytes, its marker says" in text)
    assert "000004.ckpt has an unreadable marker" in text
    with pytest.raises(ValueError, match="does not exist"):
        read_marker(folder / "step=000010.ckpt")
    assert newest_complete(tmp_path / "nowhere") is None


def test_a_folder_is_measured_whole(tmp_path):
    folder = tmp_path / "step=000001.ckpt"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "shard0").write_bytes(b"12345")
    (folder / "latest").write_bytes(b"678")
    checkpoint_files.write_marker(folder, {"step": 1, "bytes": 8})
    assert newest_complete(tmp_path) == folder
    (folder / "checkpoint" / "shard0").unlink()
    with pytest.warns(UserWarning, match="has 3 bytes, its marker says 8"):
        assert newest_complete(tmp_path) is None


def kill_when(monkeypatch, module, name, when, after=False):
    """SIGKILL this process when ``module.name`` is called and ``when`` holds for its arguments."""
    original = getattr(module, name)

    def killer(*args, **kwargs):
        if when(*args, **kwargs):
            if after:
                original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, killer)


KILLS = {
    "while writing": (torch, "save", lambda *a, **k: True, False),
    "before the rename": (os, "replace", lambda a, b: str(b).endswith("4.ckpt"), False),
    "after the rename": (os, "replace", lambda a, b: str(b).endswith("4.ckpt"), True),
    "while writing the marker": (json, "dump", lambda *a, **k: True, False),
    "before the marker's rename": (os, "replace", lambda a, b: str(b).endswith("4.ckpt.complete"), False),
    "after the marker's rename": (os, "replace", lambda a, b: str(b).endswith("4.ckpt.complete"), True),
    "before the link": (os, "symlink", lambda *a: True, False),
    "before the link's rename": (os, "replace", lambda a, b: str(b).endswith("last.ckpt"), False),
    "while pruning": (retention, "remove", lambda p: str(p).endswith("2.ckpt"), False),
}


@pytest.mark.parametrize("where", KILLS)
@pytest.mark.filterwarnings("ignore:Passed over")
def test_killed_at_any_point_leaves_a_usable_one(tmp_path, monkeypatch, where):
    run, saver = fit(tmp_path, 2, keep_last=1, keep_best=0)
    run.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 4
    assert run.global_step == 4
    child = os.fork()
    if child == 0:
        kill_when(monkeypatch, *KILLS[where])
        saver.save(run)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    newest = newest_complete(tmp_path)
    step = torch.load(newest, weights_only=False)["global_step"]
    late = where in ("after the marker's rename", "before the link", "before the link's rename", "while pruning")
    assert step == read_marker(newest)["step"] == (4 if late else 2)
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=False)  # the link never dangles
    saver.save(run)  # the next save of that step replaces what is left and clears up
    assert [name for name in names(tmp_path) if "000002" in name or name.endswith(".partial")] == []
    assert read_marker(newest_complete(tmp_path))["step"] == 4


def test_full_disk_while_writing(tmp_path, monkeypatch):
    run, saver = fit(tmp_path, 2)
    before = names(tmp_path)
    saver._last_global_step_saved = 0

    def full(checkpoint, path, storage_options=None):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.strategy, "save_checkpoint", full)
    with pytest.raises(CheckpointError) as error:
        saver.save(run)
    assert "No space left on device" in str(error.value) and "free some space" in str(error.value)
    assert names(tmp_path) == before and newest_complete(tmp_path)


def test_full_disk_between_a_file_and_its_marker(tmp_path, monkeypatch):
    run, saver = fit(tmp_path, 2)
    before = names(tmp_path)
    run.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 4

    def full(marker, file):
        file.write("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(CheckpointError, match="step=000004.ckpt: .*No space left on device"):
        saver.save(run)
    assert names(tmp_path) == before and read_marker(newest_complete(tmp_path), verify=True)["step"] == 2


@pytest.mark.parametrize(("content", "told"), [
    (b"\xff\xfe\x00{", "it is no JSON in UTF-8"), (b"[1]", "expected an object with step and bytes"),
    (b'{"step": "x", "bytes": 4}', "step is 'x', expected a whole number"),
    (b'{"step": 2}', "bytes is None, expected a whole number"),
    (b'{"step": 2, "bytes": 4, "crc32": 7}', "crc32 is 7, expected a number for each file"),
    (b'{"step": 2, "bytes": 4, "score": "low"}', "score is 'low', expected a number"),
])  # fmt: skip
def test_a_marker_that_says_something_else(tmp_path, content, told):
    path = tmp_path / "step=000002.ckpt"
    path.write_bytes(b"four")
    path.with_name(path.name + ".complete").write_bytes(content)
    with pytest.raises(ValueError, match=f"unreadable marker step=000002.ckpt.complete: {told}. Use another one"):
        read_marker(path)
    assert complete_checkpoints(tmp_path) == {}


def test_full_disk_is_seen_before_writing(tmp_path, monkeypatch):
    run, saver = fit(tmp_path, 2)
    saver._last_global_step_saved = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(CheckpointError, match="needs about 0.0 MB .0.0 MB were left on the disk"):
        saver.save(run)
    assert read_marker(newest_complete(tmp_path))["step"] == 2


def test_later_ones_of_an_abandoned_continuation_are_set_aside(tmp_path):
    fit(tmp_path, 8, keep_last=4)
    with pytest.warns(UserWarning, match="set aside"):
        fit(tmp_path, 5, ckpt_path=tmp_path / "checkpoints/step=000004.ckpt", keep_last=4)
    kept = [name for name in names(tmp_path) if not name.endswith(".complete")]
    assert kept == ["last.ckpt", "step=000002.ckpt", "step=000004.ckpt", "step=000005.ckpt",
                    "step=000006.ckpt.superseded", "step=000008.ckpt.superseded"]  # fmt: skip
    assert newest_complete(tmp_path).name == "step=000005.ckpt"


def test_bad_settings():
    with pytest.raises(ValueError, match="keep_last 0, keep_every_n_steps None, keep_best 1: use at least 1"):
        RunCheckpoint(keep_last=0)
    with pytest.raises(ValueError, match="keep_every_n_steps 0, keep_best 1: use at least 1"):
        RunCheckpoint(keep_every_n_steps=0)


def test_a_metric_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.warns(UserWarning, match="checkpoint.monitor 'val/los' is no metric of .*: use one of val/loss$"):
        fit(tmp_path / "wrong", 2, monitor="val/los")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="checkpoint.monitor")
        fit(tmp_path / "right", 2)


def test_keeps_every_n(tmp_path):
    fit(tmp_path, 12, keep_last=1, keep_best=0, keep_every_n_steps=4)
    kept = [name for name in names(tmp_path) if name.endswith(".ckpt")]
    assert kept == ["last.ckpt", "step=000004.ckpt", "step=000008.ckpt", "step=000012.ckpt"]


class LateDisk:
    """torch.save that waits for a word, and fails where it is told to."""

    def __init__(self, monkeypatch, fail_at=None):
        self.go, self.fail_at, self.calls, self.save = threading.Event(), fail_at, 0, torch.save
        monkeypatch.setattr(torch, "save", self)

    def __call__(self, state, path):
        self.calls += 1
        assert self.go.wait(60)
        if self.calls == self.fail_at:
            raise OSError(28, "No space left on device")
        self.save(state, path)


class Word(Callback):
    """Lets the disk go on at a step; notes which checkpoints were whole at each step's end."""

    def __init__(self, disk, at):
        self.disk, self.at, self.whole = disk, at, {}

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.at:
            self.disk.go.set()
            deadline = time.monotonic() + 60
            while not trainer.checkpoint_callback.io.done():
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def on_train_batch_end(self, trainer, *args):
        folder = trainer.checkpoint_callback.dirpath
        self.whole[trainer.global_step] = [marker["step"] for marker in complete_checkpoints(folder).values()]


def background_run(folder, word, every=2):
    seed_everything(1, verbose=False)
    saver = RunCheckpoint(folder / "checkpoints", every_n_train_steps=every, keep_last=9)
    run = trainer(folder, 8, [saver, word], val_check_interval=2, logger=JsonlLogger(folder))
    run.fit(TinyModel(), datamodule=TinyData(step_rows=4, micro=4))
    return run


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    whole, _ = fit(tmp_path / "whole", 4)
    word = Word(LateDisk(monkeypatch), at=5)
    background_run(tmp_path, word, every=4)
    assert word.whole[4] == word.whole[5] == [] and word.whole[7] == [4]  # trained on, then whole
    found = complete_checkpoints(tmp_path / "checkpoints")
    assert ([marker["step"] for marker in found.values()] == [4, 8]
            and all("score" in marker for marker in found.values()))
    first, expected = (torch.load(folder / "checkpoints/step=000004.ckpt") for folder in (tmp_path, tmp_path / "whole"))
    assert first["global_step"] == 4  # what was saved is what was there, not what training has made of it since
    assert all(torch.equal(value, first["state_dict"][name]) for name, value in expected["state_dict"].items())
    for path in found:
        read_marker(path, verify=True)
    stalls = [line["checkpoint/stall_s"] for line in read_metrics(tmp_path / "metrics.jsonl")
              if "checkpoint/stall_s" in line]
    assert len(stalls) == 2 and all(0 < stall < 30 for stall in stalls)


def test_a_failure_in_the_background_ends_the_run(tmp_path, monkeypatch):
    word = Word(LateDisk(monkeypatch, fail_at=1), at=3)
    with pytest.raises(CheckpointError, match="step=000002.ckpt: .*No space left on device"):
        background_run(tmp_path, word, every=2)
    assert max(word.whole) == 4 and list((tmp_path / "checkpoints").iterdir()) == []


def test_a_file_that_grows_too_large(tmp_path):
    """A real failure in the middle of a file: the process may not write more than some bytes."""
    run, saver = fit(tmp_path, 2)
    before = names(tmp_path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            saver._last_global_step_saved = 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
            saver.save(run)
        except CheckpointError as error:
            code = 42 if "older checkpoints there are untouched" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert names(tmp_path) == before and read_marker(newest_complete(tmp_path), verify=True)["step"] == 2


def test_one_that_is_written_is_whole_before_the_validation_after_it_ends(tmp_path, monkeypatch):
    """A validation may take long, and what comes in it may end the process."""
    monkeypatch.setattr(checkpoint_io, "LARGE", 0)
    seen, disk = [], LateDisk(monkeypatch)

    class InValidation(Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            disk.go.set()
            saver = trainer.checkpoint_callback
            while not saver.io.done():
                time.sleep(0.01)
            seen.append([marker["step"] for marker in complete_checkpoints(saver.dirpath).values()])

    background_run(tmp_path, InValidation(), every=4)
    assert seen[:6] == [[]] * 2 + [[]] + [[4]] + [[4]] * 2  # step 2, 4 and 6; two batches each
    assert all("score" in marker for marker in complete_checkpoints(tmp_path / "checkpoints").values())


def test_another_checkpoint_beside_them(tmp_path):
    """A person's ModelCheckpoint, and one more at the end: whole, without a marker, and in no marker."""
    seed_everything(1, verbose=False)
    saver = RunCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2)
    mine = ModelCheckpoint(tmp_path / "mine", every_n_train_steps=1, save_top_k=-1)
    run = trainer(tmp_path, 4, [saver, mine], val_check_interval=2)
    run.fit(TinyModel(), datamodule=TinyData(step_rows=4, micro=4))
    run.save_checkpoint(tmp_path / "last.ckpt")
    assert len(list((tmp_path / "mine").iterdir())) == 4
    for path in [*(tmp_path / "mine").iterdir(), tmp_path / "last.ckpt"]:
        assert 1 <= torch.load(path, weights_only=False)["global_step"] <= 4
    for path in complete_checkpoints(tmp_path / "checkpoints"):
        assert list(read_marker(path, verify=True)["crc32"]) == ["."]


def test_a_score_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    def full(path, marker):
        if "score" in marker:
            raise OSError(28, "No space left on device")
        checkpoint_files.write_marker(path, marker)

    monkeypatch.setattr(retention, "write_marker", full)
    with pytest.warns(UserWarning, match="cannot be one of the best: .*No space left on device"):
        fit(tmp_path, 4)
    assert [marker.get("score") for marker in complete_checkpoints(tmp_path / "checkpoints").values()] == [None, None]


def test_later_ones_that_cannot_be_set_aside_end_the_run(tmp_path, monkeypatch):
    fit(tmp_path, 4)
    first = tmp_path / "checkpoints/step=000002.ckpt"
    monkeypatch.setattr(retention.os, "replace", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(CheckpointError, match="of steps after 2 cannot be renamed: .*Permission denied.*--run_dir"):
        fit(tmp_path, 4, ckpt_path=first)
