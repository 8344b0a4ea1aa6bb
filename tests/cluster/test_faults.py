"""What goes wrong in a run of two ranks: it ends within a stated time with a message, and goes on losing nothing but
the steps since the last complete checkpoint. Curves are compared to the bit with those of the run left alone."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import ROOT, Ranks, curve, tiny, with_callback

from callbacks import newest_complete, read_marker

STEPS = 24
PACE = with_callback("Pace", seconds=0.02)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("whole") / "run"
    Ranks(folder, tiny(STEPS)).finish()
    return curve(folder)


def goes_on(folder: Path, whole: dict, step: int, *argv: str) -> None:
    """The newest complete checkpoint is that of `step`, and the run resumes from it to the curve of the whole."""
    assert newest_complete(folder).name == f"step={step:06d}.ckpt"
    Ranks(folder, tiny(STEPS, *argv)).finish()
    assert curve(folder) == whole


@pytest.mark.parametrize(("hook", "step", "saved"), [
    ("on_before_backward", 6, 7), ("on_validation_start", 10, 11), ("on_save_checkpoint", 10, 11),
])  # fmt: skip
@pytest.mark.parametrize(("number", "code"), [("SIGUSR1", 85), ("SIGTERM", 143)])
def test_a_signal_to_one_rank_ends_both_saved(number, code, hook, step, saved, whole, tmp_path):
    ranks = Ranks(tmp_path / "run", tiny(STEPS, *with_callback("Deed", deed=number, hook=hook, step=step)))
    codes, outputs = ranks.end(90)
    assert codes == [code, 0], outputs
    assert f"stopped by {number}: step {saved} is saved in" in outputs[0], outputs
    assert f"go on with python -m recipes.pretrain --resume {tmp_path / 'run'}" in outputs[0]
    goes_on(tmp_path / "run", whole, saved)


@pytest.mark.parametrize("way", ["zero1", "zero3"])
def test_a_warning_under_sharding(way, tmp_path):
    script = Path(__file__).with_name("sharded.py")
    codes, outputs = Ranks(tmp_path, [str(tmp_path), way], script=str(script)).end(150)
    assert codes == [0, 0], outputs
    assert all(f"rank {rank} went on to the bit" in output for rank, output in enumerate(outputs)), outputs


def test_one_rank_killed(whole, tmp_path):
    """The other one is told by the closed connection, at once."""
    ranks = Ranks(tmp_path / "run", tiny(STEPS, *PACE, *with_callback("Deed", deed="SIGKILL", step=15)))
    codes, outputs = ranks.end(90)
    assert codes == [3, -signal.SIGKILL], outputs
    assert "stopped: another rank has ended, or hangs" in outputs[0] and "--resume" in outputs[0], outputs
    goes_on(tmp_path / "run", whole, 10)


@pytest.mark.parametrize("way", ["ddp", "zero3"])
def test_one_rank_killed_in_a_validation(way, whole, tmp_path):
    """Its step is saved already; what it would have measured is measured first when the run goes on."""
    script = str(ROOT / "tests/distributed/pretrain_on_cpus.py") if way == "zero3" else None
    folder, sharded = tmp_path / "run", ["--trainer.strategy", "zero3", "--trainer.devices", "2", "--resume", "auto"]
    argv = tiny(STEPS, *[*sharded, "--run_dir", str(folder)] * (way == "zero3"))
    deed = with_callback("Deed", deed="SIGKILL", hook="on_validation_batch_end", step=10)
    codes, outputs = Ranks(folder, [*argv, *deed], script).end(90)
    assert codes == [3, -signal.SIGKILL], outputs
    assert newest_complete(folder).name == "step=000010.ckpt" and (10, "val/loss") not in curve(folder)
    codes, outputs = Ranks(folder, argv, script).end(120)
    assert codes == [0, 0] and "step 10 was saved and not validated" in outputs[0], outputs
    near = pytest.approx(whole, rel=1e-3)  # other sums, and rates that let the loss of so small a model jump
    assert curve(folder) == (whole if way == "ddp" else near)
    assert "score" in read_marker(folder / "checkpoints/step=000010.ckpt")


def test_one_rank_hangs(whole, tmp_path):
    """The other one waits for the strategy's time-out, 10 s here, and no longer than 20 s more."""
    argv = tiny(STEPS, *PACE, *with_callback("Deed", deed="SIGSTOP", step=15), "--trainer.strategy", "DDPStrategy",
                "--trainer.strategy.timeout", "0:00:10")
    ranks, begun = Ranks(tmp_path / "run", argv), None
    try:
        end = time.monotonic() + 90
        while ranks.processes[0].poll() is None:
            assert time.monotonic() < end, "no end to the wait"
            if begun is None and "T (stopped)" in Path(f"/proc/{ranks.processes[1].pid}/status").read_text():
                begun = time.monotonic()
            time.sleep(0.2)
        waited = time.monotonic() - begun
    finally:
        ranks.processes[1].kill()
    codes, outputs = ranks.end(10)
    assert codes[0] == 3 and "another rank has ended, or hangs" in outputs[0] and 8 < waited < 30, (waited, outputs)
    goes_on(tmp_path / "run", whole, 10)


def test_all_ranks_killed(whole, tmp_path):
    steps = tmp_path / "steps"
    ranks = Ranks(tmp_path / "run", tiny(STEPS, *with_callback("Pace", seconds=0.1, steps=steps)))
    end = time.monotonic() + 90
    while not (steps.exists() and steps.read_text() and int(steps.read_text()) >= 15):
        assert time.monotonic() < end
        time.sleep(0.02)
    for process in ranks.processes:
        process.kill()
    assert ranks.end(10)[0] == [-signal.SIGKILL] * 2
    goes_on(tmp_path / "run", whole, 10)


def test_a_loader_worker_that_hangs_on_one_rank(tmp_path):
    """That rank says so after its time-out, 3 s here; the other one follows."""
    argv = tiny(STEPS, "--data", "faults.StalledData", "--data.num_workers", "1",
                "--checkpoint.every_n_train_steps", "3")
    codes, outputs = Ranks(tmp_path / "run", argv, TEST_WORKER_TIMEOUT="3").end(90)
    assert codes == [3, 3], outputs
    assert "stopped: no batch came from 1 loader workers within 3 s" in outputs[1] and "--resume" in outputs[1], outputs
    assert "another rank has ended" in outputs[0], outputs
    assert newest_complete(tmp_path / "run").name == "step=000006.ckpt"


def documents(folder: Path, *more: str) -> list[str]:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("some words in a text of no great length " * 400)
    return ["--config", "configs/longdoc-tiny.yaml", "--data.source", "null", "--data.store", str(folder / "store"),
            "--data.vocab_size", "null", "--model.config.d_model", "16", "--data.row_tokens", "32",
            "--data.global_batch_tokens", "128", "--data.micro_batch_rows", "2", "--trainer.max_steps", str(STEPS),
            "--trainer.accelerator", "cpu", "--model.optimizer.warmup_steps", "2", "--trainer.strategy", "ddp",
            "--checkpoint.every_n_train_steps", "10", "--trainer.val_check_interval", "20", *more]


def store(folder: Path) -> list[str]:
    argv = documents(folder)
    command = [sys.executable, "-m", "recipes.prepare", "--source", str(folder / "text.txt"), "--vocab_size", "280",
               "--heldout", "0", "--out", str(folder / "store")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return argv


def test_a_store_that_vanishes_under_a_run(tmp_path):
    """Mapped files outlive their names, so the run ends as usual or says what is missing; a resume says it at once."""
    argv, steps = store(tmp_path), tmp_path / "steps"
    ranks = Ranks(tmp_path / "run", [*argv, *with_callback("Pace", seconds=0.1, steps=steps)])
    end = time.monotonic() + 90
    while not (steps.exists() and steps.read_text() and int(steps.read_text()) >= 12):
        assert time.monotonic() < end, ranks.end(1)
        time.sleep(0.02)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for process in ranks.processes:
        process.send_signal(signal.SIGTERM)
    codes, outputs = ranks.end(90)
    assert codes == [143, 0], outputs
    saved = newest_complete(tmp_path / "run").name
    assert f"no token store at {tmp_path / 'store'}" in Ranks(tmp_path / "run", argv).refused()
    assert newest_complete(tmp_path / "run").name == saved
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    Ranks(tmp_path / "run", argv).finish()
    assert newest_complete(tmp_path / "run").name == f"step={STEPS:06d}.ckpt"


def test_a_corrupted_newest_checkpoint_is_passed_over(whole, tmp_path):
    ranks = Ranks(tmp_path / "run", tiny(STEPS, *PACE, *with_callback("Deed", deed="SIGKILL", step=22)))
    ranks.end(90)
    newest = newest_complete(tmp_path / "run")
    assert newest.name == "step=000020.ckpt"
    os.truncate(newest, newest.stat().st_size // 2)
    codes, outputs = Ranks(tmp_path / "run", tiny(STEPS)).end(120)
    assert codes == [0, 0] and "step=000020.ckpt" in outputs[0] and "going on at step 10" in outputs[0], outputs
    assert curve(tmp_path / "run") == whole
    shutil.rmtree(tmp_path / "run")
