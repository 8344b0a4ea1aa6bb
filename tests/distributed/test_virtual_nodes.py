"""`python -m recipes.virtual_nodes` on CPU processes: what its ranks do together, and how they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from callbacks import read_metrics
from recipes import virtual_nodes
from vla_lm.checkpoint_files import complete_checkpoints

ROOT = Path(__file__).parents[2]
# By trainers of earlier tests, in this process, or by a scheduler.
LEFT_BEHIND = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_NTASKS")
SIZES = {"trainer.accelerator": "cpu", "data.val_rows": 16, "data.global_batch_tokens": 1024, "data.num_workers": 0,
         "trainer.val_check_interval": 1000, "checkpoint.every_n_train_steps": 1000}
GONE_S = 90  # ranks that are told to end may save for 60 s; measured: 3


@pytest.fixture
def start(tmp_path):
    """Starts two nodes into tmp_path/run; what still runs at the test's end is killed."""
    started = []

    def of(steps, *words):
        settings = SIZES | {"trainer.max_steps": steps, "run_dir": tmp_path / "run"}
        command = [sys.executable, "-W", "ignore", "-m", "recipes.virtual_nodes", 2, "--config", "configs/mqar.yaml",
                   *(text for key, value in settings.items() for text in (f"--{key}", value)), *words]
        kept = {key: value for key, value in os.environ.items() if key not in LEFT_BEHIND}
        kept |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        started.append(subprocess.Popen(list(map(str, command)), cwd=ROOT, env=kept, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield of
    for launcher in started:
        for pid in [*ranks(launcher), launcher.pid] if launcher.poll() is None else []:
            os.kill(pid, signal.SIGKILL)


def ranks(launcher):
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


def training(launcher, folder):
    """Waits for a run's third step; the ranks' process numbers."""
    metrics, end = folder / "metrics.jsonl", time.monotonic() + 90
    while not metrics.exists() or max((line["step"] for line in read_metrics(metrics)), default=0) < 3:
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < end, "no third step"
        time.sleep(0.1)
    return ranks(launcher)


def test_it_is_one_run(start, tmp_path):
    launcher = start(3, "--trainer.log_every_n_steps", 1, "--model.optimizer.warmup_steps", 1)
    said, noted = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, noted
    assert said.count("results in") == 1 and "on 2 x cpu" in noted
    steps = [line["step"] for line in read_metrics(tmp_path / "run/metrics.jsonl") if "train/loss" in line]
    saved = [path.name for path in complete_checkpoints(tmp_path / "run/checkpoints")]
    assert steps == [1, 2, 3] and saved == ["step=000003.ckpt"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is left in the folder for temporary files"


def test_what_is_its_own_is_refused(capsys):
    for words in (["--trainer.devices", "2"], ["--trainer.num_nodes=3"]):
        with pytest.raises(SystemExit) as end:
            virtual_nodes.main(["2", "--config", "configs/mqar.yaml", *words])
        assert end.value.code == 2 and f"error: {words[0]} is set by recipes.virtual_n" in capsys.readouterr().err


def test_in_a_slurm_job_it_is_refused(monkeypatch, capsys):
    for name, value in {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        virtual_nodes.main(["2"])
    assert end.value.code == 2 and "whose nodes are real: start recipes.pretrain" in capsys.readouterr().err


@pytest.mark.cluster
def test_what_the_ranks_refuse_is_refused(start, tmp_path):
    launcher = start(3, "--model.optimizer.warmup_steps", 9)
    said, noted = launcher.communicate(timeout=120)
    assert launcher.returncode == 2 and noted.count("error: ") == 1
    assert "error: warmup_steps 9 leaves nothing of trainer.max_steps 3" in noted and not (tmp_path / "run").exists()


@pytest.mark.cluster
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 85)])
def test_asked_to_end_it_saves(start, tmp_path, number, code):
    launcher = start(100_000, "--trainer.log_every_n_steps", 1)
    pids = training(launcher, tmp_path / "run")
    launcher.send_signal(number)
    said, noted = launcher.communicate(timeout=GONE_S)
    assert launcher.returncode == code, noted
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    saved = list(complete_checkpoints(tmp_path / "run/checkpoints"))
    assert len(saved) == 1 and f"{saved[0].name}: go on with" in said + noted


@pytest.mark.cluster
def test_asked_twice_it_ends_at_once(start, tmp_path):
    launcher = start(100_000, "--trainer.log_every_n_steps", 1)
    pids = training(launcher, tmp_path / "run")
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.02)
    said, noted = launcher.communicate(timeout=GONE_S)
    assert launcher.returncode == 130 and "Traceback" not in noted, noted
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.cluster
def test_ranks_end_with_what_started_them(start, tmp_path):
    launcher = start(100_000, "--trainer.log_every_n_steps", 1)
    pids = training(launcher, tmp_path / "run")
    launcher.kill()
    end = time.monotonic() + GONE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len(list(complete_checkpoints(tmp_path / "run/checkpoints"))) == 1


@pytest.mark.cluster
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_rank_ends_all(start, tmp_path, node):
    launcher = start(100_000, "--trainer.log_every_n_steps", 1)
    pids = training(launcher, tmp_path / "run")
    os.kill(pids[node], signal.SIGKILL)
    launcher.communicate(timeout=GONE_S)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
