"""Tiny runs for the tests of this folder: their command line, their ranks as processes, what is compared of them."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from callbacks import read_metrics

ROOT = Path(__file__).parents[2]
FOLDERS = f"{ROOT}:{Path(__file__).parent}:{ROOT / 'tests/distributed'}"


def tiny(steps: int, *more: str) -> list[str]:
    return ["--config", "configs/mqar.yaml", "--model.config.d_model", "16", "--data.n_pairs", "2",
            "--data.length", "16", "--data.val_n_pairs", "[2]", "--data.val_lengths", "[16]", "--data.val_rows", "16",
            "--data.global_batch_tokens", "128", "--trainer.max_steps", str(steps), "--trainer.val_check_interval", "5",
            "--trainer.log_every_n_steps", "1", "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp",
            "--model.optimizer.warmup_steps", "2", "--checkpoint.every_n_train_steps", "10",
            "--state_norms.every_n_steps", "10", *more]


def with_callback(name: str, **arguments: object) -> list[str]:
    return [f"--trainer.callbacks+=faults.{name}", *(f"--trainer.callbacks.{key}={v}" for key, v in arguments.items())]


class Ranks:
    """Two gloo processes of one run, each with its own output, as a scheduler starts them.

    script: what they run with `argv` in place of the recipe.
    """

    def __init__(self, folder: Path, argv: list[str], script: str | None = None, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.folder, self.processes = folder, []
        recipe = ["-m", "recipes.pretrain", "--trainer.devices", "2", "--run_dir", str(folder), "--resume", "auto"]
        quiet = ["-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning"]  # of libraries about themselves
        command = [sys.executable, *quiet, *([script] if script else recipe), *argv]
        for rank in range(2):
            settings = {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": FOLDERS}  # fmt: skip
            self.processes.append(subprocess.Popen(
                command, cwd=ROOT, env=os.environ | settings | environment, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT))

    def end(self, seconds: float) -> tuple[list[int], list[str]]:
        """Exit codes and outputs; AssertionError where a rank is still there after `seconds`."""
        limit, outputs = time.monotonic() + seconds, []
        try:
            for process in self.processes:
                outputs.append(process.communicate(timeout=max(limit - time.monotonic(), 0.1))[0])
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a rank hangs after {seconds} s") from None
        finally:
            for process in self.processes:
                process.kill()
        return [process.returncode for process in self.processes], outputs

    def refused(self) -> str:
        """What rank 0 said when it ended with exit code 2; the other one waits until its launcher ends it."""
        try:
            output = self.processes[0].communicate(timeout=60)[0]
        finally:
            for process in self.processes:
                process.kill()
        self.end(10)
        assert self.processes[0].returncode == 2 and "Traceback" not in output, output
        return output

    def finish(self, seconds: float = 120) -> None:
        codes, outputs = self.end(seconds)
        assert codes == [0, 0], outputs


def curve(folder: Path) -> dict[tuple[int, str], float]:
    """All that is logged and does not depend on the clock: (step, name) -> value. A number logged twice is an error."""
    found = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        for name, value in line.items():
            if name.startswith(("train/", "val/", "gradient_norm/", "state_norm/", "jacobian_norm/")):
                assert (line["step"], name) not in found, f"{name} of step {line['step']} is there twice"
                found[line["step"], name] = value
    return found
