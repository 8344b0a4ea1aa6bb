"""Every way in which a job and a configuration do not fit is told with the line that mends it, before any work."""

import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.documents import DocumentsDataModule
from data.sampler import plan_batches
from recipes import preflight, prepare, pretrain
from recipes.cluster import problems
from recipes.job import Job
from recipes.planning import store_problem

ROOT = Path(__file__).parents[2]
EIGHT = Job(2, 8, 8, cpus=3)


@pytest.fixture(autouse=True)
def in_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def data(rows: int = 64, workers: int = 2) -> SimpleNamespace:
    return SimpleNamespace(batch_plan=lambda ranks: plan_batches(rows * 8, 8, None, ranks), num_workers=workers)


def trainer(**changes) -> dict:
    return {"accelerator": "gpu", "devices": 8, "num_nodes": 2} | changes


FITS = {
    "two nodes": (EIGHT, trainer(), data()),
    "auto is all GPUs": (EIGHT, trainer(devices="auto"), data()),
    "a list of devices": (Job(1, 2, 2), trainer(devices=[0, 1], num_nodes=1), data()),
    "a CPU": (Job(2, 2, 0), trainer(accelerator="cpu", devices=2), data()),
    "a CPU beside GPUs": (Job(2, 2, 4), trainer(accelerator="cpu", devices=2), data()),
    "one process": (Job(1, 1, 0), trainer(accelerator="auto", devices="auto", num_nodes=1), data()),
}
MISFITS = {
    "fewer tasks than GPUs": (Job(2, 1, 8), trainer(), data(),
                              ["1 task on nodes of 8 GPUs", "#SBATCH --ntasks-per-node=8"]),
    "unequal tasks": (Job(2, None, 8), trainer(), data(), ["unequal numbers of tasks", "#SBATCH --ntasks-per-node=8"]),
    "no GPUs": (Job(2, 8, 0), trainer(), data(), ["asks for no GPUs", "#SBATCH --gpus-per-node=8"]),
    "devices": (EIGHT, trainer(devices=4), data(),
                ["trainer.devices is 4", "--trainer.devices 8", "#SBATCH --gpus-per-node=4"]),
    "devices auto on a CPU": (Job(2, 2, 0), trainer(accelerator="cpu", devices="auto"), data(),
                              ["--trainer.devices 2"]),
    "nodes": (EIGHT, trainer(num_nodes=1), data(), ["--trainer.num_nodes 2", "#SBATCH --nodes=1"]),
    "batch": (EIGHT, trainer(), data(rows=63), ["63 rows per optimizer step", "cannot be shared evenly by 16 ranks"]),
    "cores": (EIGHT, trainer(), data(workers=6), ["3 cores a task", "6 loader workers", "#SBATCH --cpus-per-task=7"]),
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
    ({"SLURM_NNODES": "", "SLURM_GPUS_PER_NODE": "a100:1,v100:2"}, Job(1, 1, 3)),
])  # fmt: skip
def test_what_slurm_says(variables, job):
    assert Job.here(variables) == job


@pytest.mark.parametrize(("name", "value"), [
    ("SLURM_NNODES", "x"), ("SLURM_NNODES", "0"), ("SLURM_GPUS_ON_NODE", "all"), ("SLURM_GPUS_PER_NODE", "a100:"),
    ("SLURM_CPUS_PER_TASK", "4.5"), ("SLURM_NTASKS_PER_NODE", "x"), ("SLURM_TASKS_PER_NODE", "2(x"),
])  # fmt: skip
def test_a_variable_that_makes_no_sense_is_named(name, value, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        preflight.main(["--config", "configs/mqar.yaml"])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.startswith(f"error: {name} is {value!r}: expected a whole number, at least ")
    assert f"(unset {name})" in told


def test_the_recipe_prints_the_line_that_submits(capsys):
    preflight.main(["--nodes", "2", "--gpus-per-node", "4", "--config", "configs/mqar.yaml", "--data.num_workers", "2"])
    out = capsys.readouterr().out
    assert "64 rows of 64 tokens, 8 rows at once on each of 8 ranks, accumulation 1" in out
    assert ("submit: sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=3 slurm/pretrain.sbatch "
            "--config configs/mqar.yaml --data.num_workers 2") in out
    assert "optimizer states" in out and "of the device" in out


def test_a_plan_that_does_not_fit_a_gpu_is_refused_with_its_mend(capsys):
    argv = ["--nodes", "1", "--gpus-per-node", "2", "--config", "configs/mqar.yaml",
            "--config", "configs/strategy/zero3.yaml", "--model.config.d_model", "2048",
            "--model.config.n_layers", "24"]
    preflight.main([*argv, "--gpu-gb", "80"])
    assert "trainer.strategy zero3" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        preflight.main([*argv, "--gpu-gb", "10"])
    assert stop.value.code == 2 and "a GPU has 10 GB: lower data.micro_batch_rows" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "message"), [
    (["--nodes", "3", "--gpus-per-node", "8"], "cannot be shared evenly by 24 ranks"),
    (["--nodes", "0"], "--nodes: invalid PositiveInt value: '0'"),
    (["--gpus-per-node", "8", "--tasks-per-node", "2"], "#SBATCH --ntasks-per-node=8"),
    (["--model.config.penalty", "some"], "model.config.penalty: expected float"),
    (["--trainer.strategy", "zero4"], "error: trainer.strategy is 'zero4': expected auto, ddp, zero1, zero2 or zero3"),
    (["--trainer.strategy", "fsdp"], "error: trainer.strategy is 'fsdp': expected auto, ddp, zero1, zero2 or zero3"),
    (["--trainer.accumulate_grad_batches", "3"], "error: trainer.accumulate_grad_batches is 3: leave it out"),
    (["--model.optimizer.warmup_steps", "5000", "--trainer.max_steps", "500"],
     "error: warmup_steps 5000 leaves nothing"),
    (["--resume", "runs/none"], "error: --resume runs/none: no such file or folder"),
    (["--resume", "auto"], "error: --resume auto looks into the run's own folder, which was not named"),
    (["--trainer.accelerator", "cpu", "--trainer.strategy", "zero3"],
     "strategy zero3 (DeepSpeed) needs CUDA devices, the accelerator here is cpu"),
    (["--model.config.vocab_size", "100"], "error: vocab_size 100 is smaller than the data's 128"),
    (["--model.config.style", "paper", "--model.config.max_positions", "8"], "error: max_positions 8 is less than"),
    (["--checkpoint.keep_last", "0"], "keep_last 0"),
    (["--state_norms.every_n_steps", "0"], "every_n_steps"),
    (["--trainer.profiler", "foo"], "profiler"),
    (["--trainer.max_time", "foo"], "is not a valid duration"),
    (["--trainer.limit_val_batches", "-1"], "limit_val_batches"),
    (["--trainer.enable_checkpointing", "false"], "enable_checkpointing=False"),
    (["--gpus-per-node", "2", "--trainer.strategy", "zero3", "--trainer.precision", "64-true"], "64-true"),
    (["--gpus-per-node", "2", "--trainer.strategy", "zero3", "--run_dir", "runs/a*"], "name another folder"),
])  # fmt: skip
def test_the_recipe_refuses(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        preflight.main([*argv, "--trainer.accelerator", "gpu"] if "--gpus-per-node" in argv else argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_strategy_may_be_a_name(stage, capsys):
    preflight.main(["--gpus-per-node", "2", "--trainer.strategy", f"zero{stage}"])
    out = capsys.readouterr().out
    assert f"fits: 1 node x 2 tasks, 2 GPUs a node, trainer.strategy zero{stage}" in out and "masters" in out


def test_a_strategy_may_be_a_name_in_a_process_of_its_own():
    """Here another import may have registered it."""
    command = [sys.executable, "-m", "recipes.preflight", "--gpus-per-node", "2", "--trainer.strategy", "zero3"]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and "trainer.strategy zero3" in done.stdout, done.stderr
    assert done.stdout.startswith("fits: "), "and no notice about the accelerators of this machine"


def test_keys_of_the_person_win_over_the_scripts_as_in_the_job(capsys):
    argv = ["--nodes", "1", "--gpus-per-node", "2", "--trainer.devices", "3", "--trainer.num_nodes", "5"]
    with pytest.raises(SystemExit) as stop:
        preflight.main(argv)
    told = capsys.readouterr().err
    assert stop.value.code == 2 and "trainer.devices is 3 and a node has 2 GPUs" in told
    assert "trainer.num_nodes is 5 and the job has 1 node:" in told


def test_a_plan_for_cpus_is_made_for_cpus(capsys):
    argv = ["--tasks-per-node", "2", "--config", "configs/mqar.yaml"]
    said = []
    for accelerator in ("cpu", "gpu"):
        more = ["--gpus-per-node", "2"] if accelerator == "gpu" else []
        preflight.main([*argv, *more, "--trainer.accelerator", accelerator, "--gpu-gb", "1"])
        said.append(capsys.readouterr().out)
    activations = [next(line for line in text.splitlines() if "activations" in line) for text in said]
    assert activations[0] != activations[1], "the chunked backend keeps other tensors than Triton's"
    assert "--ntasks-per-node=2 --gpus-per-node=0 " in said[0], "else the script's own default of 8 would count"


def test_one_rank_is_told_as_one(capsys):
    preflight.main(["--config", "configs/mqar.yaml", "--data.global_batch_tokens", "64"])
    out = capsys.readouterr().out
    assert "fits: 1 node x 1 task, 0 GPUs a node" in out
    assert "a step: 1 row of 64 tokens, 1 row at once on 1 rank, accumulation 1" in out


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, capsys):
    folder = tmp_path / "run"
    tiny = ["--config", "configs/mqar.yaml", "--trainer.accelerator", "cpu", "--trainer.max_steps", "2",
            "--model.optimizer.warmup_steps", "1", "--data.val_rows", "4", "--data.global_batch_tokens", "256"]
    pretrain.main([*tiny, "--run_dir", str(folder)])
    preflight.main(["--resume", str(folder)])
    capsys.readouterr()
    for more, said in ((["--model.config.d_model", "32"], "is of another architecture: d_model is 64 there"),
                       (["--data.n_pairs", "4"], "n_pairs")):
        with pytest.raises(SystemExit) as stop:
            preflight.main(["--resume", str(folder), *more])
        assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_precision_without_a_plan_is_said(capsys):
    preflight.main(["--gpus-per-node", "2", "--trainer.strategy", "ddp", "--trainer.precision", "64-true",
                    "--gpu-gb", "80"])
    out = capsys.readouterr().out
    assert "no estimate: " in out and "64-true" in out and "for a GPU of 80 GB" not in out
    preflight.main(["--gpus-per-node", "2", "--trainer.precision", "32"])
    assert "(--gpu-gb compares it):" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["model.config", "model.optimizer"])
def test_a_group_may_be_null_as_in_a_run(key, tmp_path, capsys):
    group, name = key.split(".")
    (tmp_path / "null.yaml").write_text(f"{group}:\n  {name}:\n")
    preflight.main(["--config", "configs/mqar.yaml", "--config", str(tmp_path / "null.yaml")])
    assert "fits" in capsys.readouterr().out


def test_one_process_has_no_buckets(capsys):
    preflight.main(["--config", "configs/mqar.yaml"])
    assert "buckets" not in capsys.readouterr().out


def test_inside_a_job_no_line_is_printed_that_submits_it(monkeypatch, capsys):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    preflight.main(["--config", "configs/mqar.yaml", "--trainer.accelerator", "cpu"])
    out = capsys.readouterr().out
    assert out.startswith("fits: 1 node x 1 task") and "sbatch" not in out


def test_help_says_where_other_arguments_go(capsys):
    with pytest.raises(SystemExit):
        preflight.main(["--help"])
    assert "All other arguments go to recipes.pretrain" in capsys.readouterr().out


def test_a_missing_store_is_told_after_the_plan(tmp_path, capsys):
    argv = ["--nodes", "2", "--gpus-per-node", "4", "--config", "configs/longdoc-125m.yaml"]
    with pytest.raises(SystemExit) as stop:
        preflight.main([*argv, "--data.store", str(tmp_path / "store")])
    said = capsys.readouterr()
    assert stop.value.code == 2 and "fits, but for the token store: 2 nodes x 4 tasks" in said.out
    assert "optimizer states" in said.out and "submit" not in said.out
    assert said.err.startswith(f"error: the token store {tmp_path / 'store'} is not there") and "8 ranks" in said.err
    with pytest.raises(SystemExit) as stop:  # the vocabulary is the store's, so there is nothing to plan with
        preflight.main([*argv, "--data.store", str(tmp_path / "store"), "--data.source", "null",
                        "--data.vocab_size", "null"])
    assert stop.value.code == 2 and "data.source is null" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [
    {"source": ["hf:emozilla/pg19"], "max_bytes": 12_000_000_000, "vocab_size": 32768},
    {"source": ["books/*.txt", "more books"], "text_column": "body", "heldout": 0.1},
    {"tokenizer": "a model", "vocab_size": None, "subset": "en", "split": "all"},
    {},
])  # fmt: skip
def test_the_line_that_makes_the_store_makes_this_one(settings, tmp_path, monkeypatch):
    asked = DocumentsDataModule(store=str(tmp_path / "a store"), **settings)
    assert store_problem(asked, 1) is None, "the run makes it itself"
    line = shlex.split(store_problem(asked, 2).splitlines()[-1])
    assert line[:3] == ["python", "-m", "recipes.prepare"]
    assert set(settings) & {"max_bytes", "heldout"} <= {word.removeprefix("--") for word in line}
    made = []
    monkeypatch.setattr(prepare, "prepare_store",
                        lambda out, request, *_, **__: made.append((out, request)) or (None, True))
    monkeypatch.setattr(prepare, "_report", lambda *_: None)
    assert prepare.main(line[3:]) == 0
    assert made == [(asked.store_path, asked.request)]


def test_what_is_there_must_be_the_store(tmp_path):
    (tmp_path / "store").mkdir()
    for source in ("sotu", None):
        problem = store_problem(DocumentsDataModule(store=str(tmp_path / "store"), source=source), 2)
        assert "holds no token store" in problem
    (tmp_path / "text.txt").write_text("Some words of a document. " * 200)
    asked = dict(store=str(tmp_path / "made"), source=str(tmp_path / "text.txt"), vocab_size=280, heldout=0.0)
    DocumentsDataModule(**asked).prepare_data()
    assert store_problem(DocumentsDataModule(**asked), 2) is None
    assert "vocab_size" in store_problem(DocumentsDataModule(**asked | {"vocab_size": 300}), 2)


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
