"""The batch scripts on a real SLURM of two virtual nodes: warned, requeued, finished; given up; failed; refused."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import yaml
from one_machine_slurm import OneMachineSlurm
from runs import FOLDERS, ROOT, Ranks, curve, tiny, with_callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import newest_complete

pytestmark = pytest.mark.timeout(420)
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")


def ended(state: str) -> bool:
    return state in ENDED


class Job:
    """A batch script submitted for CPU processes: two nodes of one task, where nothing else is said."""

    def __init__(
        self, slurm: OneMachineSlurm, folder: Path, script: str, argv: list[str], *options: str, **more: str
    ) -> None:
        self.slurm, self.log, self.run_dir = slurm, folder / "job.log", folder / "run"
        self.given = os.path.relpath(self.run_dir, ROOT)  # as the scripts' own runs/NAME-ID is
        given = [f"--chdir={ROOT}", f"--output={self.log}", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2",
                 "--cpus-per-task=1", "--time=10", *options]
        environment = {"PYTHON": sys.executable, "PYTHONPATH": FOLDERS, "RUN_DIR": self.given} | more
        self.id = slurm.run("sbatch", "--parsable", *given, f"slurm/{script}", *argv, **environment).strip()

    def wait(self, done=ended, seconds: float = 180) -> str:
        """State once `done(state)`."""
        try:
            self.slurm.follow(self.id, done, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None
        return self.slurm.state(self.id)

    def said(self) -> str:
        logs = [self.log, *sorted(self.run_dir.glob("logs/*/rank-*.log"))]
        return "\n".join(f"== {log}\n{log.read_text()}" for log in logs if log.exists())

    def wait_for(self, text: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < end and not ended(self.slurm.state(self.id)), self.said()
            time.sleep(0.3)


@pytest.fixture(scope="module")
def warned(slurm, tmp_path_factory) -> tuple[Job, int]:
    """A run that SLURM itself warned in its first start, requeued and finished; the step it was at when warned."""
    folder = tmp_path_factory.mktemp("warned")
    argv = tiny(400, "--checkpoint.every_n_train_steps", "1000", *with_callback("Pace", seconds=0.35))
    job = Job(slurm, folder, "pretrain.sbatch", argv, "--time=4", "--signal=USR1@120")
    job.wait(lambda state: state == "PENDING" and slurm.field(job.id, "Restarts") == "1", 300)
    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=10")  # else the second start is warned at once
    step = int(newest_complete(job.run_dir).stem.split("=")[1])
    assert job.wait() == "COMPLETED", job.said()
    return job, step


def test_warned_requeued_and_finished(warned):
    job, step = warned
    said = job.said()
    assert 0 < step < 400 and f"stopped by SIGUSR1: step {step} is saved in" in said
    assert f"job {job.id} goes back into the queue" in said and f"going on at step {step} of 400" in said
    assert newest_complete(job.run_dir).name == "step=000400.ckpt"
    assert (job.run_dir / "requeues").read_text().split() == [f"step={step:06d}.ckpt.complete", "0"]
    starts = json.loads((job.run_dir / "environment.json").read_text())
    assert [start["resumed_step"] for start in starts] == [None, step]


def test_a_requeued_run_is_one_curve_that_of_the_run_left_alone(warned, tmp_path):
    job, _ = warned
    Ranks(tmp_path / "whole", tiny(400, "--checkpoint.every_n_train_steps", "1000")).finish()
    assert len({step for step, name in curve(job.run_dir) if name == "train/loss"}) == 400
    assert curve(job.run_dir) == curve(tmp_path / "whole")
    events = EventAccumulator(str(job.run_dir)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(400)), "TensorBoard shows no step twice"


def test_evaluated_by_a_job(warned, slurm, tmp_path):
    run, _ = warned
    argv = [str(run.run_dir), "--pairs", "2", "--lengths", "16", "--rows", "16", "--device", "cpu"]
    job = Job(slurm, tmp_path, "evaluate.sbatch", argv, "--nodes=1")
    assert job.wait() == "COMPLETED", job.said()
    assert json.loads((run.run_dir / "evaluation.json").read_text())["step"] == 400


def test_a_job_that_gets_nowhere_gives_up(slurm, tmp_path):
    """An interpreter that always asks for another start, and never saves."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\n'
                      'case "$*" in *recipes.pretrain*) [ $SLURM_PROCID = 0 ] || exit 0; sleep 1; exit 85;; esac\n'
                      f'exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = Job(slurm, tmp_path, "pretrain.sbatch", tiny(10), PYTHON=str(python))
    assert job.wait(seconds=240) == "FAILED"
    said = job.said()
    assert "requeued 3 times without a new checkpoint (newest: none), so this job gives up" in said
    assert said.count("goes back into the queue") == 3 and slurm.field(job.id, "Restarts") == "3"


@pytest.mark.parametrize("deed", ["raise", "SIGKILL"])
def test_a_rank_that_fails_ends_the_job_and_is_named(deed, slurm, tmp_path):
    job = Job(slurm, tmp_path, "pretrain.sbatch", tiny(100, *with_callback("Pace", seconds=0.1),
                                                       *with_callback("Deed", deed=deed, step=35)))
    job.wait_for("step 10/")
    begun = time.monotonic()
    assert job.wait(seconds=60) == "FAILED" and time.monotonic() - begun < 60
    said = job.log.read_text()
    if deed == "raise":
        assert "rank 1 failed first" in said and "ValueError: a fault made for the test" in said, said
    else:
        assert "task 1: Killed" in said and "rank 1 left no word" in said, said
    assert f"when mended go on with: RUN_DIR={job.given} sbatch" in said
    assert newest_complete(job.run_dir).name == "step=000030.ckpt", "saved every 10 steps"
    again = Job(slurm, tmp_path, "pretrain.sbatch", tiny(100))
    assert again.wait() == "COMPLETED" and "going on at step 30 of 100" in again.said()


def test_a_job_begins_from_the_checkpoint_given_and_goes_on_with_its_own(slurm, tmp_path):
    first = Job(slurm, tmp_path, "pretrain.sbatch", tiny(20))
    assert first.wait() == "COMPLETED", first.said()
    (tmp_path / "other").mkdir()
    source = ["--resume", str(first.run_dir / "checkpoints/step=000010.ckpt")]
    job = Job(slurm, tmp_path / "other", "pretrain.sbatch", tiny(20, *source))
    assert job.wait() == "COMPLETED" and "going on at step 10 of 20" in job.said(), job.said()
    again = Job(slurm, tmp_path / "other", "pretrain.sbatch", tiny(20, *source))
    assert again.wait() == "COMPLETED" and "it is at step 20 of 20" in again.said(), again.said()


def test_a_cancelled_job_is_saved_and_stays_ended(slurm, tmp_path):
    job = Job(slurm, tmp_path, "pretrain.sbatch", tiny(1000, *with_callback("Pace", seconds=0.1)))
    job.wait_for("step 5/")
    slurm.run("scancel", job.id)
    assert job.wait() == "CANCELLED"
    time.sleep(3)
    assert slurm.state(job.id) == "CANCELLED" and "stopped by SIGTERM: step" in job.said(), job.said()
    assert newest_complete(job.run_dir)


def test_a_job_that_does_not_fit_is_refused_before_it_starts(slurm, tmp_path):
    job = Job(slurm, tmp_path, "pretrain.sbatch", tiny(10, "--trainer.accelerator", "gpu"))
    assert job.wait() == "FAILED" and slurm.field(job.id, "ExitCode") == "2:0"
    said = job.log.read_text()
    assert "1 task on nodes of 2 GPUs" in said and "#SBATCH --ntasks-per-node=2" in said
    assert not job.run_dir.exists()


def test_a_sweep_trains_every_mixer_with_every_seed(slurm, tmp_path):
    argv = tiny(3, "--trainer.strategy", "auto")
    job = Job(slurm, tmp_path, "sweep.sbatch", argv, "--nodes=1", "--array=0-1", MIXERS="vla linear", SEEDS="7")
    end = time.monotonic() + 120
    while slurm.run("squeue", "-h", "-j", job.id, check=False).strip():
        assert time.monotonic() < end, job.said()
        time.sleep(0.5)
    assert all(newest_complete(job.run_dir / name).name == "step=000003.ckpt" for name in ("vla-seed7", "linear-seed7"))
    assert yaml.safe_load((job.run_dir / "linear-seed7/config.yaml").read_text())["seed_everything"] == 7


def test_a_sweep_of_the_wrong_size_is_refused(slurm, tmp_path):
    job = Job(slurm, tmp_path, "sweep.sbatch", tiny(3), "--nodes=1", "--array=0-0", MIXERS="vla linear", SEEDS="7 8")
    assert job.wait() == "FAILED" and "submit with --array=0-3" in job.said()
