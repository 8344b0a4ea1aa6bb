"""The batch scripts without a SLURM: where they may be submitted from, and how a run that ended is gone on with."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENDINGS = {"failed": "exit 3", "ended from outside": "kill -TERM $PPID; exit 143"}


def submitted(script: str, folder: Path, *argv: str, where: Path = ROOT, end: str = "exit 3", **environment: str):
    """The script as a batch job would run it, with an interpreter that finds all well and an srun that does `end`."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in {"srun": end, "scontrol": "echo n1", "python": "exit 0"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM") and name != "RUN_DIR"}
    job = {"SLURM_JOB_ID": "14", "SLURM_JOB_NAME": "vla-lm", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1",
           "SLURM_NTASKS_PER_NODE": "1", "PYTHON": str(tools / "python"), "PATH": f"{tools}:{os.environ['PATH']}"}
    return subprocess.run(["bash", ROOT / "slurm" / script, *argv], cwd=where, env=kept | job | environment, text=True,
                          capture_output=True, check=False)


def array(task: int, last: int, count: int) -> dict[str, str]:
    return {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MAX": str(last),
            "SLURM_ARRAY_TASK_COUNT": str(count), "MIXERS": "vla linear", "SEEDS": "1 2"}


@pytest.mark.parametrize("script", ["pretrain.sbatch", "sweep.sbatch", "evaluate.sbatch"])
def test_submitted_from_another_folder(script, tmp_path):
    done = submitted(script, tmp_path, "runs/vla-lm-1", where=ROOT / "slurm", **array(0, 3, 4))
    assert done.returncode == 2
    assert done.stderr == f"no slurm/job.sh in {ROOT / 'slurm'}: submit from the project's folder\n"


@pytest.mark.parametrize("how", ENDINGS)
def test_a_run_is_gone_on_with_in_its_folder(how, tmp_path):
    done = submitted("pretrain.sbatch", tmp_path, end=ENDINGS[how], RUN_DIR=str(tmp_path / "run"))
    assert done.returncode in (3, 143) and f"go on with: RUN_DIR={tmp_path / 'run'} sbatch (the same" in done.stdout


@pytest.mark.parametrize("how", ENDINGS)
def test_a_sweep_is_gone_on_with_in_the_folder_of_the_sweep(how, tmp_path):
    sweep = tmp_path / "sweep"
    done = submitted("sweep.sbatch", tmp_path, end=ENDINGS[how], RUN_DIR=str(sweep), **array(3, 3, 4))
    line = f'MIXERS="vla linear" SEEDS="1 2" RUN_DIR={sweep} sbatch --array=3 (the same line)'
    assert done.returncode in (3, 143) and f"go on with: {line}" in done.stdout, done.stdout + done.stderr
    assert [path.name for path in sweep.iterdir()] == ["linear-seed2"]


@pytest.mark.parametrize(("numbers", "there", "code"), [
    ((3, 3, 1), True, 3), ((3, 3, 1), False, 2), ((0, 4, 5), True, 2), ((3, 3, 4), False, 3),
])  # fmt: skip
def test_a_part_of_a_sweep_runs_only_where_the_sweep_is_there(numbers, there, code, tmp_path):
    sweep = tmp_path / "sweep"
    if there:
        (sweep / "linear-seed2").mkdir(parents=True)
    done = submitted("sweep.sbatch", tmp_path, RUN_DIR=str(sweep), **array(*numbers))
    assert done.returncode == code, done.stderr
    assert ("submit with --array=0-3" in done.stderr) == (code == 2)
    assert (sweep / "linear-seed2/logs").exists() == (code == 3)
