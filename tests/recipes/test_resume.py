"""SIGKILL at a random step, twice: losses, batches and weights are those of the run left alone, bit for bit.

And in two validations, the last one's too: what they would have measured is measured at the resume.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from callbacks import newest_complete, read_marker, read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 24
MQAR = ["--config", "configs/mqar.yaml", "--model.config.d_model", "16", "--data.n_pairs", "2",
        "--data.val_n_pairs", "[2]", "--data.length", "16", "--data.val_lengths", "[16]", "--data.val_rows", "16",
        "--data.global_batch_tokens", "256", "--data.micro_batch_rows", "8"]
DOCUMENTS = ["--config", "configs/longdoc-tiny.yaml", "--model.config.d_model", "16", "--data.vocab_size", "300",
             "--data.row_tokens", "32", "--data.global_batch_tokens", "128", "--data.micro_batch_rows", "2",
             "--data.val_rows", "4", "--data.carry_state", "true"]


def command(folder: Path, extra: list[str], *more: str) -> list[str]:
    return [sys.executable, "-m", "recipes.pretrain", *extra, "--run_dir", os.path.relpath(folder, ROOT),
            "--resume", "auto", "--trainer.max_steps", str(STEPS),
            "--trainer.log_every_n_steps", "1", "--trainer.val_check_interval", "7",
            "--trainer.accelerator", "cpu", "--model.optimizer.warmup_steps", "3",
            "--checkpoint.every_n_train_steps", "4", "--state_norms.every_n_steps", "6",
            "--trainer.callbacks+=batch_recorder.BatchRecorder", f"--trainer.callbacks.path={folder}.batches", *more]


def start(folder: Path, extra: list[str], *more: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/recipes'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(folder, extra, *more), cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output


def kill_at(process: subprocess.Popen, folder: Path, step: int) -> None:
    """SIGKILL once `step` has begun, somewhere within it or a little later."""
    record, begun = Path(f"{folder}.batches"), time.monotonic()
    while not (record.exists()
               and any(int(line.split()[0]) >= step for line in record.read_text().splitlines() if line)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() - begun < 200, f"step {step} was not reached"
        time.sleep(0.002)
    time.sleep(random.random() * 0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["train/loss"], line["gradient_norm/global"])
            for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line}


def batches(folder: Path) -> dict[tuple[str, str], set[str]]:
    """(step, micro-batch) -> the hashes of what was trained there, over all starts."""
    found: dict[tuple[str, str], set[str]] = {}
    for line in Path(f"{folder}.batches").read_text().splitlines():
        step, micro, digest = line.split()
        found.setdefault((step, micro), set()).add(digest)
    return found


@pytest.mark.parametrize("name", ["mqar", "documents"])
def test_two_kills_change_nothing(name: str, tmp_path: Path) -> None:
    extra = MQAR
    if name == "documents":
        (tmp_path / "text").mkdir()
        for i in range(12):
            words = random.Random(i).choices(["alpha", "beta", "gamma", "delta", "omega", "sigma"], k=400)
            (tmp_path / "text" / f"{i}.txt").write_text(" ".join(words))
        extra = [*DOCUMENTS, "--data.source", f"[{tmp_path / 'text'}]", "--data.store", str(tmp_path / "store")]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole, extra))
    first = random.randrange(5, 12)
    second = random.randrange(first + 4, 20)
    print(f"killed in steps {first} and {second}")
    for step in (first, second):
        kill_at(start(killed, extra), killed, step)
    finish(start(killed, extra))

    assert sorted(curve(whole)) == list(range(1, STEPS + 1))
    assert curve(killed) == curve(whole)
    assert batches(killed) == batches(whole)
    assert all(len(hashes) == 1 for hashes in batches(killed).values())
    ends = [torch.load(newest_complete(folder), weights_only=True) for folder in (whole, killed)]
    assert ends[0]["global_step"] == ends[1]["global_step"] == STEPS
    for key, value in ends[0]["state_dict"].items():
        assert torch.equal(value, ends[1]["state_dict"][key]), key
    moments = [end["optimizer_states"][0]["state"] for end in ends]
    for index, state in moments[0].items():
        for key, value in state.items():
            assert torch.equal(value, moments[1][index][key]), (index, key)


def validations(folder: Path) -> list[tuple[int, dict[str, float]]]:
    return [(line["step"], {name: value for name, value in line.items() if name.startswith("val/")})
            for line in read_metrics(folder / "metrics.jsonl") if "val/loss" in line]


@pytest.mark.cluster
def test_killed_in_validations(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    often = ["--trainer.val_check_interval", str(STEPS // 2), "--checkpoint.keep_last", "9"]
    finish(start(whole, MQAR, *often))
    for step in (STEPS // 2, STEPS):
        deed = ["--trainer.callbacks+=batch_recorder.KilledInValidation", f"--trainer.callbacks.step={step}"]
        process = start(killed, MQAR, *often, *deed)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == -signal.SIGKILL, output
        assert [at for at, _ in validations(killed)] == [at for at in (STEPS // 2,) if at < step]
    process = start(killed, MQAR, *often)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and f"step {STEPS} was saved and not validated" in output, output
    assert "exact_match" in output and "nothing is left to train" in output

    assert [at for at, _ in validations(whole)] == [STEPS // 2, STEPS]
    assert validations(killed) == validations(whole) and curve(killed) == curve(whole)
    for step in range(4, STEPS + 1, 4):
        scores = [read_marker(folder / f"checkpoints/step={step:06d}.ckpt").get("score") for folder in (whole, killed)]
        assert scores[0] == scores[1] and (scores[0] is None) == (step % (STEPS // 2) > 0)
    last = (killed / "metrics.jsonl").read_bytes()
    finish(start(killed, MQAR, *often))
    assert (killed / "metrics.jsonl").read_bytes() == last, "validated once"
