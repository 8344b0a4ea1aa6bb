"""Every way in which a job and a configuration do not fit is told with the line that mends it, before any work."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from data.sampler import plan_batches
from recipes import preflight, pretrain
from recipes.cluster import Job, problems

ROOT = Path(__file__).parents[2]
EIGHT = Job(2, 8, 8, cpus=3)


@pytest.fixture(autouse=True)
def in_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def data(rows: int = 64, workers: int = 2, **more) -> SimpleNamespace:
    return SimpleNamespace(batch_plan=lambda ranks: plan_batches(rows * 8, 8, None, ranks), num_workers=workers, **more)


def trainer(**changes) -> dict:
    return {"accelerator": "gpu", "devices": 8, "num_nodes": 2} | changes


FITS = {
    "two nodes": (EIGHT, trainer(), data()),
    "auto is all GPUs": (EIGHT, trainer(devices="auto"), data()),
    "a list of devices": (Job(1, 2, 2), trainer(devices=[0, 1], num_nodes=1), data()),
    "a CPU": (Job(2, 2, 0), trainer(accelerator="cpu", devices=2), data()),
    "a CPU beside GPUs": (Job(2, 2, 4), trainer(accelerator="cpu", devices=2), data()),
    "one process": (Job(1, 1, 0), trainer(accelerator="auto", devices="auto", num_nodes=1), data()),
    "no store, one rank": (Job(1, 1, 1), trainer(devices=1, num_nodes=1), data(store_path="nowhere")),
}
MISFITS = {
    "fewer tasks than GPUs": (Job(2, 1, 8), trainer(), data(),
                              ["1 tasks on nodes of 8 GPUs", "#SBATCH --ntasks-per-node=8"]),
    "unequal tasks": (Job(2, None, 8), trainer(), data(), ["unequal numbers of tasks", "#SBATCH --ntasks-per-node=8"]),
    "no GPUs": (Job(2, 8, 0), trainer(), data(), ["asks for no GPUs", "#SBATCH --gpus-per-node=8"]),
    "devices": (EIGHT, trainer(devices=4), data(),
                ["trainer.devices is 4", "--trainer.devices 8", "#SBATCH --gpus-per-node=4"]),
    "devices auto on a CPU": (Job(2, 2, 0), trainer(accelerator="cpu", devices="auto"), data(),
                              ["--trainer.devices 2"]),
    "nodes": (EIGHT, trainer(num_nodes=1), data(), ["--trainer.num_nodes 2", "#SBATCH --nodes=1"]),
    "batch": (EIGHT, trainer(), data(rows=63), ["63 rows per optimizer step", "cannot be shared evenly by 16 ranks"]),
    "store": (EIGHT, trainer(), data(store_path="nowhere/store"),
              ["recipes.prepare --source SOURCE --out nowhere/store"]),
    "cores": (EIGHT, trainer(), data(workers=6), ["#SBATCH --cpus-per-task=7"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FITS)
def test_what_fits(case):
    assert problems(*FITS[case]) == []


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_told_with_its_mend(case):
    *given, expected = MISFITS[case]
    found = problems(*given)
    assert len(found) == 1 and all(text in found[0] for text in expected), found


@pytest.mark.parametrize(("variables", "job"), [
    ({}, Job(1, 1, 0)),
    ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8",
      "SLURM_CPUS_PER_TASK": "3"}, EIGHT),
    ({"SLURM_NNODES": "3", "SLURM_TASKS_PER_NODE": "4(x3)", "SLURM_GPUS_PER_NODE": "h100:4"}, Job(3, 4, 4)),
    ({"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2,1"}, Job(2, None, 0)),
])  # fmt: skip
def test_what_slurm_says(variables, job):
    assert Job.here(variables) == job


def test_the_recipe_prints_the_line_that_submits(capsys):
    preflight.main(["--nodes", "2", "--gpus-per-node", "4", "--config", "configs/mqar.yaml", "--data.num_workers", "2"])
    out = capsys.readouterr().out
    assert "64 rows of 64 tokens, 8 rows at once on each of 8 ranks, accumulation 1" in out
    assert ("submit: sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=3 slurm/pretrain.sbatch "
            "--config configs/mqar.yaml --data.num_workers 2") in out
    assert "optimizer states" in out and "of the device" in out


def test_a_plan_that_does_not_fit_a_gpu_is_refused_with_its_mend(capsys):
    argv = ["--nodes", "1", "--gpus-per-node", "2", "--config", "configs/mqar.yaml",
            "--config", "configs/strategy/zero3.yaml", "--model.config.d_model", "2048", "--model.config.n_layers", "24"]
    preflight.main([*argv, "--gpu-gb", "80"])
    assert "ShardedStrategy 3" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        preflight.main([*argv, "--gpu-gb", "10"])
    assert stop.value.code == 2 and "a GPU has 10 GB: lower data.micro_batch_rows" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "message"), [
    (["--nodes", "3", "--gpus-per-node", "8"], "cannot be shared evenly by 24 ranks"),
    (["--nodes", "0"], "--nodes: invalid PositiveInt value: '0'"),
    (["--gpus-per-node", "8", "--tasks-per-node", "2"], "#SBATCH --ntasks-per-node=8"),
    (["--model.config.penalty", "some"], "model.config.penalty: expected float"),
    (["--nodes", "2", "--config", "configs/longdoc-125m.yaml", "--data.store", "nowhere"], "--out nowhere"),
])  # fmt: skip
def test_the_recipe_refuses(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        preflight.main([*argv, "--trainer.accelerator", "gpu"] if "--gpus-per-node" in argv else argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("variables", "message"), [
    ({"SLURM_NTASKS": "4"}, "put srun before python"),
    ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, "--trainer.num_nodes 2"),
])  # fmt: skip
def test_a_run_refuses_a_job_that_does_not_fit(variables, message, tmp_path, monkeypatch, capsys):
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    for name, value in (job | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        pretrain.main(["--config", "configs/mqar.yaml", "--trainer.accelerator", "cpu",
                       "--run_dir", str(tmp_path / "run")])
    assert stop.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "run").exists()
