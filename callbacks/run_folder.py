"""A run's folder: which one it is, what is resumed in it and why, and the record of how it was made.

    runs/<name>/
        config.yaml            the full configuration of the first start (a changed one at a resume: config.step=N.yaml)
        environment.json       one entry a start: its configuration's file, command, versions, devices, git state
        metrics.jsonl          every logged number, one JSON object a line
        events.out.tfevents.*  the same for TensorBoard, with figures
        checkpoints/           step=N.ckpt, each beside its step=N.ckpt.complete marker
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info

PACKAGES = ("torch", "lightning", "triton", "deepspeed", "torchmetrics", "datasets", "sentencepiece", "numpy")


def default_run_dir(config: str | None, root: str = "runs") -> Path:
    """``runs/<config's stem>-<job id or time>``, the same on every rank of a job; of a config.yaml its folder's name.

    Args:
        config: path of the run's first configuration file.
        root: folder of all runs.
    """
    # Ranks that Lightning starts inherit the environment; ranks that a scheduler starts share its job id.
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job == "none":
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "VLA_LM_START" not in os.environ:
            raise ValueError("several ranks were started without a job id, so they cannot agree on a run folder; "
                             "name one: --run_dir runs/NAME")
        job = os.environ.setdefault("VLA_LM_START", time.strftime("%Y%m%d-%H%M%S"))
    path = Path(config or "run")
    name = path.resolve().parent.name if path.name == "config.yaml" else path.stem
    return Path(root) / f"{name}-{job}"


def environment() -> dict[str, Any]:
    """Command, versions, devices and git state of this start, as plain types."""
    def git(*words: str) -> str | None:
        if shutil.which("git") is None:  # as in many containers
            return None
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip() if done.returncode == 0 else None

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    status = git("status", "--porcelain")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "packages": {package: version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "git": {"commit": git("rev-parse", "HEAD"),
                "changed_files": status.splitlines() if status is not None else None},
    }


class RunFolder(SaveConfigCallback):
    """Writes config.yaml and environment.json before the first step; a resume adds to them and replaces nothing."""

    def __init__(self, *args: Any, run_dir: Path, resumed_step: int | None, resumed_from: Path | None = None,
                 **kwargs: Any) -> None:
        super().__init__(*args, save_to_log_dir=False, **kwargs)
        self.run_dir, self.resumed_step = Path(run_dir), resumed_step
        self.resumed_from = str(resumed_from) if resumed_from else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in pl_module.parameters())
        plan = trainer.datamodule.batch_plan(trainer.world_size)
        begin = f"going on at step {self.resumed_step}" if self.resumed_step else "starting at step 0"
        if (self.resumed_step or 0) >= trainer.max_steps > 0:
            begin = f"nothing is left to train: it is at step {self.resumed_step}"
        rank_zero_info(
            f"{parameters:,} parameters, {trainer.precision} on {trainer.world_size} x {pl_module.device.type}; a step "
            f"is {plan.rows_per_step} rows of {trainer.datamodule.row_tokens} tokens "
            f"(accumulation {plan.accumulation}, {plan.micro_rows} rows at once); {begin} of {trainer.max_steps} "
            f"in {self.run_dir}")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        config = self.config.clone()
        config.run_dir, config.resume, config.trust_pickle = None, None, False  # of this start alone
        text, path = self.parser.dump(config, skip_unset=False), self.run_dir / "config.yaml"
        if path.exists() and path.read_text() != text:
            path = self.run_dir / f"config.step={self.resumed_step or 0:06d}.yaml"
        here = {"resumed_step": self.resumed_step, "resumed_from": self.resumed_from, "config": path.name}
        starts = starts_of(self.run_dir)
        write_aside(self.run_dir / "environment.json", json.dumps([*starts, here | environment()], indent=1))
        write_aside(path, text)


def starts_of(run_dir: Path) -> list[dict[str, Any]]:
    """The entries of a run's environment.json, oldest first. ValueError where it is none that was written here."""
    record = run_dir / "environment.json"
    try:
        starts = json.loads(record.read_text()) if record.exists() else []
    except ValueError:
        starts = None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise ValueError(f"{record} is no list of the run's starts in JSON: mend it, or move it away and go on without")
    return starts


def write_aside(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in one step: a reader, or a kill, never meets half a file."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:  # a full disk: what was cut off is of no use to anyone
        partial.unlink(missing_ok=True)
        raise
