"""Export, evaluation and resume of the neutral form as a person meets them; what is damaged or foreign is answered."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from callbacks import newest_complete, read_metrics
from recipes import evaluate, export, pretrain
from vla_lm.checkpoint_files import read_marker, write_marker
from vla_lm.checkpoint_io import loadable
from vla_lm.checkpoints import load_model
from vla_lm.neutral import NeutralCheckpoint

ROOT = Path(__file__).parents[2]
ZERO = {"form": "zero1", "ranks": 2, "optimizer": "DeepSpeedZeroOptimizer"}
TINY = ["--config", str(ROOT / "configs/mqar.yaml"), "--model.config.d_model", "16", "--data.n_pairs", "2",
        "--data.val_n_pairs", "[2]", "--data.val_rows", "16", "--data.length", "16", "--data.val_lengths", "[16]",
        "--data.global_batch_tokens", "128", "--trainer.max_steps", "6", "--trainer.val_check_interval", "3",
        "--trainer.log_every_n_steps", "1", "--trainer.accelerator", "cpu", "--model.optimizer.warmup_steps", "2",
        "--checkpoint.every_n_train_steps", "2", "--state_norms.every_n_steps", "6"]


@pytest.fixture(autouse=True)
def in_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run, and its checkpoint of step 4 exported."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    pretrain.main([*TINY, "--run_dir", str(folder), "--checkpoint.keep_last", "9"])
    export.main([str(folder / "checkpoints/step=000004.ckpt"), "--to", "safetensors"])
    return folder


def refused(recipe, argv, capsys):
    with pytest.raises(SystemExit) as stop:
        recipe.main(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


def losses(folder):
    lines = read_metrics(folder / "metrics.jsonl")
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def test_an_export_holds_it_all(run, tmp_path):
    native = torch.load(run / "checkpoints/step=000004.ckpt", weights_only=True)
    folder = run / "checkpoints/step=000004.neutral"
    assert {path.name for path in folder.iterdir()} == {
        "weights.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "state.json", "config.yaml",
        "complete.json"}
    weights = load_file(folder / "weights.safetensors")
    assert weights.keys() == native["state_dict"].keys()
    assert all(torch.equal(weights[name], value) for name, value in native["state_dict"].items())
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    moments = [load_file(folder / f"{kind}.safetensors") for kind in ("exp_avg", "exp_avg_sq")]
    assert (moments[0].keys() == moments[1].keys() == weights.keys()
            and all(value.any() for value in moments[1].values()))
    usual = tmp_path / "usual"
    usual.touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {usual.stat().st_mode}, (
        "the umask's, not the owner's alone")
    state = json.loads((folder / "state.json").read_text())
    assert state["global_step"] == 4 and state["MQARDataModule"]["samples"] == 4 * 8
    assert json.loads((folder / "complete.json").read_text())["step"] == 4


def test_the_newest_of_a_run_into_a_folder_of_ones_own(run, tmp_path, capsys):
    out = tmp_path / "exports" / "mine"
    export.main([str(run), "--to", "safetensors", "--out", str(out)])
    assert NeutralCheckpoint(out).state["global_step"] == 6 and f"--resume {out}" in capsys.readouterr().out
    written = (out / "state.json").stat().st_mtime_ns
    export.main([str(run), "--out", str(out)])  # is there already
    assert (out / "state.json").stat().st_mtime_ns == written
    step_4 = str(run / "checkpoints/step=000004.ckpt")
    message = refused(export, [step_4, "--out", str(out)], capsys)
    assert "holds the export of another checkpoint, of step 6, not that of" in message and "(step 4): give" in message
    assert "in the neutral form already" in refused(export, [str(out)], capsys)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert "is no neutral checkpoint" in refused(export, [str(run), "--out", str(tmp_path / "other")], capsys)
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["mine"]


def flip(file, place=-1):
    content = bytearray(file.read_bytes())
    content[place] ^= 255
    file.write_bytes(content)


def test_an_export_is_of_its_own_source_alone(run, tmp_path, capsys):
    step_4, out = run / "checkpoints/step=000004.ckpt", tmp_path / "x"
    other = tmp_path / "b" / step_4.name  # another run's of the same step
    other.parent.mkdir()
    content = torch.load(step_4, weights_only=True)
    content["state_dict"]["transformer.embedding.weight"] += 1
    torch.save(content, other)
    write_marker(other, {"step": 4, "bytes": other.stat().st_size})
    export.main([str(step_4), "--out", str(out)])
    whole = {file.name: file.read_bytes() for file in out.iterdir()}
    message = refused(export, [str(other), "--out", str(out)], capsys)
    assert "holds the export of another checkpoint, of step 4" in message
    for place in (step_4, step_4 / "x", out / "weights.safetensors"):
        refused(export, [str(step_4), "--out", str(place)], capsys)
    assert step_4.is_file() and {file.name: file.read_bytes() for file in out.iterdir()} == whole
    flip(out / "weights.safetensors")
    (out / "notes.txt").write_text("mine")
    assert "a damaged export with other files" in refused(export, [str(step_4), "--out", str(out)], capsys)
    (out / "notes.txt").unlink()
    export.main([str(step_4), "--out", str(out)])  # of the same source and damaged: written anew
    assert {file.name: file.read_bytes() for file in out.iterdir()} == whole
    marker = json.loads((out / "complete.json").read_text())
    del marker["source"]  # an older version's
    (out / "complete.json").write_text(json.dumps(marker))
    assert "step 4 it does not name" in refused(export, [str(step_4), "--out", str(out)], capsys)


def test_a_resume_makes_a_damaged_neutral_form_anew(run, tmp_path):
    path = tmp_path / "step=000004.ckpt"
    shutil.copyfile(run / "checkpoints/step=000004.ckpt", path)
    write_marker(path, {"step": 4, "bytes": path.stat().st_size})
    out = loadable(path, ZERO)
    whole, written = (out / "weights.safetensors").read_bytes(), (out / "state.json").stat().st_mtime_ns
    assert loadable(path, ZERO) == out and (out / "state.json").stat().st_mtime_ns == written
    flip(out / "weights.safetensors")
    assert loadable(path, ZERO) == out and (out / "weights.safetensors").read_bytes() == whole
    (out / "complete.json").unlink()  # a removal that was killed
    assert loadable(path, ZERO) == out and read_marker(out, verify=True)["made_for"] == "resume"
    export.main([str(path)])
    assert "made_for" not in read_marker(out, verify=True)  # a person's: no run removes it


@pytest.mark.parametrize("name", ["n.neutral", "q", "q.partial"])
def test_files_of_a_person_s_own_stay(run, tmp_path, capsys, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("mine")
    message = refused(export, [str(run), "--out", str(tmp_path / name.removesuffix(".partial"))], capsys)
    assert str(tmp_path / name) in message and "move it away" in message
    assert [path.name for path in tmp_path.rglob("*")] == [name, "thesis.txt"]


def test_a_full_disk_leaves_nothing(run, tmp_path):
    """A real failure in the middle of a file: the process may not write more than some bytes."""
    small = ("import resource as r, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
             "r.setrlimit(r.RLIMIT_FSIZE, (8000, 8000))")
    code = f"{small}; from recipes import export; export.main({[str(run), '--out', str(tmp_path / 'x')]!r})"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and list(tmp_path.iterdir()) == []
    assert "Traceback" not in done.stderr and "x could not be written (File too large)" in done.stderr, done.stderr
    for kind, error in ((OSError, OSError(28, "No space left on device")), (ValueError, KeyError("exp_avg"))):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(kind, match="cannot be turned into the neutral form"):
            patch.setattr("vla_lm.checkpoint_io.export", lambda *a, error=error, **k: (_ for _ in ()).throw(error))
            loadable(run / "checkpoints/step=000004.ckpt", ZERO)  # any failure is told to the other ranks


def test_evaluate_and_load_model_take_it(run, tmp_path):
    folder = run / "checkpoints/step=000004.neutral"
    a, b = load_model(folder), load_model(folder.with_suffix(".ckpt"))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    lone = tmp_path / "lone"
    shutil.copytree(folder, lone / "some.neutral")
    before = {path.name for path in run.iterdir()}
    options = ["--pairs", "2", "--lengths", "8", "--rows", "8", "--device", "cpu"]
    for path, results in ((folder, run), (lone / "some.neutral", lone / "some.neutral")):
        evaluate.main([str(path), *options])
        assert json.loads((results / "evaluation.json").read_text())["step"] == 4
        read_marker(path, verify=True)  # whole as before
    assert {path.name for path in run.iterdir()} - before == {"evaluation.json", "evaluation.png"}
    assert not (folder / "evaluation.json").exists() and len(list(lone.iterdir())) == 1


def test_a_documents_run_s_export_is_evaluated_and_gone_on_from_outside(tmp_path, capsys, monkeypatch):
    for name in range(8):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"words of text {n * n + name} of some length"
                                                       for n in range(40)))
    options = ["--config", "configs/longdoc-tiny.yaml", "--data.source", f"[{tmp_path}]",
               "--data.store", str(tmp_path / "store"), "--data.heldout", "0.3", "--data.vocab_size", "290",
               "--model.config.d_model", "16", "--data.row_tokens", "32", "--data.global_batch_tokens", "128",
               "--trainer.max_steps", "4", "--trainer.accelerator", "cpu", "--model.optimizer.warmup_steps", "0",
               "--trainer.val_check_interval", "4", "--checkpoint.every_n_train_steps", "2",
               "--checkpoint.keep_last", "9"]
    pretrain.main([*options, "--run_dir", str(tmp_path / "run")])
    out = {step: tmp_path / f"exports/at{step}" for step in (2, 4)}
    for step, folder in out.items():
        export.main([str(tmp_path / f"run/checkpoints/step={step:06d}.ckpt"), "--out", str(folder)])
        capsys.readouterr()
        evaluate.main([str(folder), "--device", "cpu", *(["--pairs", "2", "--lengths", "16"] if step == 4 else [])])
        said = capsys.readouterr()
        assert "no config.yaml" not in said.err and ("accuracy per query" in said.out) == (step == 4)
        rows = re.search(r"all (\d+) rows are read; the run's own heldout/bits_per_byte reads 64, its data.val_rows",
                         " ".join(said.out.split()))[1]
        assert 0 <= said.out.find("held-out documents:") < said.out.find("│ " + "all".rjust(19) + " │")
    results = [json.loads((folder / "evaluation.json").read_text()) for folder in out.values()]
    assert ([result["step"] for result in results] == [2, 4]
            and all((f / "evaluation.png").exists() for f in out.values()))
    assert ["mqar" in result for result in results] == [False, True] and list(results[1])[-2:] == ["documents", "mqar"]
    assert results[0]["documents"]["rows"] == int(rows) > 64
    assert results[0]["documents"]["bits_per_byte"] > results[1]["documents"]["bits_per_byte"] > 0
    assert {path.name for path in (tmp_path / "exports").iterdir()} == {"at2", "at4"}
    assert not (tmp_path / "run/evaluation.json").exists()
    config = out[2] / "config.yaml"
    config.write_text(config.read_text() + "# moved\n")  # a person's own to edit
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLA_LM_START", raising=False)
    pretrain.main(["--resume", "exports/at2"])  # as export prints it
    found, = (tmp_path / "runs").glob("at2-*")
    assert losses(found) == {step: loss for step, loss in losses(tmp_path / "run").items() if step > 2}
    assert ("max_steps: 4" in (found / "config.yaml").read_text()
            and "DocumentsDataModule" in (found / "config.yaml").read_text())


def test_resume_goes_on_to_the_bit(run, tmp_path, capsys):
    pretrain.main([*TINY, "--run_dir", str(tmp_path / "on"), "--resume", str(run / "checkpoints/step=000004.neutral")])
    whole = losses(run)
    assert losses(tmp_path / "on") == {step: whole[step] for step in (5, 6)}
    ends = [load_model(folder).state_dict() for folder in (run, tmp_path / "on")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_other_software_s_weights_begin_a_run(run, tmp_path, capsys):
    folder = tmp_path / "foreign"
    folder.mkdir()
    weights = load_file(run / "checkpoints/step=000004.neutral/weights.safetensors")
    save_file(weights, folder / "weights.safetensors")
    hyper = json.loads((run / "checkpoints/step=000004.neutral/state.json").read_text())["hyper_parameters"]
    (folder / "state.json").write_text(json.dumps({"format": 1, "global_step": 0, "hyper_parameters": hyper}))
    assert all(torch.equal(value, weights[name]) for name, value in load_model(folder).state_dict().items())
    pretrain.main([*TINY, "--run_dir", str(tmp_path / "run"), "--resume", str(folder)])
    found = losses(tmp_path / "run")
    assert list(found) == [1, 2, 3, 4, 5, 6] and found[1] < losses(run)[1]  # trained before
    assert list(read_metrics(tmp_path / "run/metrics.jsonl"))[0]["train/lr"] < hyper["optimizer"]["learning_rate"]
    (folder / "state.json").write_text(json.dumps({"format": 1, "global_step": 3, "hyper_parameters": hyper}))
    message = refused(pretrain, [*TINY, "--run_dir", str(tmp_path / "x"), "--resume", str(folder)], capsys)
    assert "set global_step to 0" in message
    (folder / "state.json").write_text(json.dumps({"format": 9, "global_step": 0, "hyper_parameters": hyper}))
    assert "has format 9" in refused(evaluate, [str(folder), "--device", "cpu"], capsys)


def test_damage_at_equal_size_is_passed_over(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    damaged = copy / "checkpoints/step=000006.ckpt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 255
    damaged.write_bytes(content)
    assert newest_complete(copy) == damaged  # its size is right
    options = ["--pairs", "2", "--lengths", "8", "--rows", "8", "--device", "cpu"]
    assert "is damaged: the bytes of it are not" in refused(evaluate, [str(damaged), *options], capsys)
    with pytest.warns(UserWarning, match="step=000006.ckpt is damaged.*checksum"):
        evaluate.main([str(copy), *options])  # a run's folder gives the newest whole one
    assert json.loads((copy / "evaluation.json").read_text())["step"] == 4
    with pytest.warns(UserWarning, match="step=000006.ckpt is damaged.*checksum"):
        pretrain.main([*TINY, "--run_dir", str(copy), "--resume", "auto"])
    assert losses(copy) == losses(run)
    assert (copy / "checkpoints/step=000006.ckpt").read_bytes() != bytes(content)  # written anew
    weights = copy / "checkpoints/step=000004.neutral/weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 255
    weights.write_bytes(content)
    message = refused(pretrain, [*TINY, "--run_dir", str(tmp_path / "x"), "--resume", str(weights.parent)], capsys)
    assert "is damaged: the bytes of weights.safetensors" in message
    assert "is damaged: the bytes of weights.saf" in refused(evaluate, [str(weights.parent), *options], capsys)


def test_a_folder_of_pickles_is_trusted_in_a_run_alone(tmp_path, capsys):
    folder = tmp_path / "step=000004.ckpt"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "mp_rank_00_model_states.pt").write_bytes(b"no pickle at all")
    size = (folder / "checkpoint" / "mp_rank_00_model_states.pt").stat().st_size
    (tmp_path / "step=000004.ckpt.complete").write_text(json.dumps({"step": 4, "bytes": size}))
    recipes = [(evaluate, [str(folder), "--device", "cpu"]), (export, [str(folder)]),
               (pretrain, [*TINY, "--resume", str(folder), "--run_dir", str(tmp_path / "x")])]
    for recipe, argv in recipes:
        assert "add --trust-pickle" in refused(recipe, argv, capsys)
        assert "is no readable checkpoint" in refused(recipe, [*argv, "--trust-pickle"], capsys)
