"""The recipe as a person meets it: what a run leaves, what bad input is answered with, every shipped configuration."""

import errno
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import newest_complete, read_metrics
from recipes import evaluate, export, prepare, pretrain
from recipes.console import arguments
from recipes.ending import stopped_by
from recipes.evaluated import recall_cells
from vla_lm.checkpoint_files import last_config
from vla_lm.config import ModelConfig

ROOT = Path(__file__).parents[2]
TINY = ["--model.config.d_model", "16", "--data.n_pairs", "2", "--data.val_n_pairs", "[2]", "--data.val_rows", "16",
        "--data.length", "16", "--data.val_lengths", "[16]", "--data.global_batch_tokens", "128",
        "--trainer.max_steps", "6", "--trainer.val_check_interval", "3", "--trainer.log_every_n_steps", "1",
        "--trainer.accelerator", "cpu", "--model.optimizer.warmup_steps", "2",
        "--checkpoint.every_n_train_steps", "3", "--state_norms.every_n_steps", "2"]


@pytest.fixture(autouse=True)
def in_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("VLA_LM_START", raising=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        pretrain.main([*TINY, "--run_dir", str(folder)])
    return folder


def test_a_run_leaves_its_folder(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["init_args"]["n_pairs"] == 2 and config["model"]["config"]["d_model"] == 16
    start = json.loads((run / "environment.json").read_text())[0]
    assert start["packages"]["torch"] and start["packages"]["lightning"] and "commit" in start["git"]
    assert newest_complete(run).name == "step=000006.ckpt"
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "val/pairs2_len16/exact_match" in line] == [3, 6]
    events = EventAccumulator(str(run), size_guidance={"images": 0}).Reload()
    assert {"train/loss", "gradient_norm/layers.0", "throughput/tokens_per_second"} <= set(events.Tags()["scalars"])
    assert events.Tags()["images"], "the figure of the state norms"


def test_evaluate_writes_table_json_and_figure(run: Path, capsys: pytest.CaptureFixture) -> None:
    evaluate.main([str(run), "--pairs", "2", "4", "--lengths", "8", "16", "--rows", "16", "--device", "cpu"])
    results = json.loads((run / "evaluation.json").read_text())
    assert {(c["n_pairs"], c["length"]) for c in results["mqar"]["grid"]} == {(2, 8), (2, 16), (4, 16)}
    assert results["step"] == 6 and (run / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert "left out of the grid: n_pairs 4 does not fit length 8" in capsys.readouterr().out


def test_results_of_another_evaluation_are_kept(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True, ignore=shutil.ignore_patterns("evaluation*"))
    argv, seen = ["--lengths", "16", "--rows", "8", "--device", "cpu"], []
    for pairs, kept in ((1, False), (1, False), (2, True), (3, True)):
        evaluate.main([str(copy), "--pairs", str(pairs), *argv])
        assert ("kept: the results that were there" in capsys.readouterr().out) == kept
        seen.append([(copy / f"evaluation.{kind}").read_bytes() for kind in ("json", "png")])
    assert {path.name for path in copy.glob("evaluation*")} == {
        f"evaluation{n}.{kind}" for n in ("", ".1", ".2") for kind in ("json", "png")}
    for number, content in ((1, seen[0]), (2, seen[2])):
        assert [(copy / f"evaluation.{number}.{kind}").read_bytes() for kind in ("json", "png")] == content


@pytest.mark.parametrize("limit", [100, 8000])
def test_results_on_a_full_disk(limit: int, run: Path, tmp_path: Path) -> None:
    """A real failure, in the record or in the figure: the process may not write more than some bytes."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True, ignore=shutil.ignore_patterns("evaluation*"))
    before, argv = {*copy.iterdir()}, [str(copy), "--pairs", "2", "--lengths", "16", "--rows", "8", "--device", "cpu"]
    fill = f"r.setrlimit(r.RLIMIT_FSIZE, ({limit}, {limit}))"
    for code, now, said in ((2, fill, "error: {} cannot be written to (File too large): make room"),
                            (3, f"evaluate.check_writable = lambda _: {fill}",
                             "stopped: the results could not be written into {} (File too large): make room")):
        program = ("import resource as r, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
                   f"from recipes import evaluate; {now}; evaluate.main({argv!r})")
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == code and said.format(copy) in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and ("accuracy per query" in done.stdout) == (code == 3)
    assert {path.name for path in {*copy.iterdir()} - before} == ({"evaluation.json"} if limit == 8000 else set())


def test_a_folder_with_a_run_is_not_trained_over(run: Path, capsys: pytest.CaptureFixture) -> None:
    before = (run / "metrics.jsonl").read_text()
    assert refused([*TINY, "--run_dir", str(run)], capsys).endswith("name another folder (--run_dir runs/NAME)\n")
    assert (run / "metrics.jsonl").read_text() == before


def test_resume_goes_on_with_the_runs_own_configuration(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    for path in copy.glob("checkpoints/step=000006*"):
        path.unlink()
    pretrain.main(["--resume", str(copy), "--trainer.log_every_n_steps", "3"])
    steps = [line["step"] for line in read_metrics(copy / "metrics.jsonl") if "train/loss" in line]
    assert steps == [1, 2, 3, 6], "what the interrupted run logged past the resumed step is gone"
    assert newest_complete(copy).name == "step=000006.ckpt"
    first, changed = copy / "config.yaml", copy / "config.step=000003.yaml"
    starts = json.loads((copy / "environment.json").read_text())
    assert [start["config"] for start in starts] == [first.name, changed.name], "kept beside the first"
    assert changed.read_text() == first.read_text().replace("log_every_n_steps: 1\n", "log_every_n_steps: 3\n")
    # The next resume goes on as the last one, and so does one of a checkpoint that it began from or made.
    checkpoints = [copy / f"checkpoints/{name}.ckpt" for name in ("last", "step=000003", "step=000006")]
    assert [arguments(["--resume", str(path)])[1] for path in (copy, *checkpoints)] == [str(changed)] * 4
    assert last_config(copy, step=2) == first
    (copy / "environment.json").write_text("{")
    assert last_config(copy) == first


@pytest.mark.parametrize("steps", [6, 7])
def test_a_run_that_was_not_validated_at_its_end_goes_on_longer(steps: int, tmp_path: Path) -> None:
    """Step 6 is saved when it is done, step 7 when training has ended; both are the data's last."""
    constant = [*TINY, "--run_dir", str(tmp_path), "--model.optimizer.schedule", "constant"]
    pretrain.main([*constant, "--trainer.max_steps", str(steps)])
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True)
                           if not (f'"step": {steps},' in line and "val/" in line)))
    longer = ["--resume", "auto", "--trainer.max_steps", "14", "--trainer.val_check_interval", str(steps)]
    pretrain.main([*constant, *longer])
    lines = read_metrics(log)
    assert [line["step"] for line in lines if "val/loss" in line] == sorted({3, steps, steps // 7 * 6, 2 * steps} - {0})
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 15))


def test_no_folder_gets_a_mixture_of_two_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    other, old, new = tmp_path / "other", run / "checkpoints/step=000003.ckpt", tmp_path / "export"
    shutil.copytree(run, other, symlinks=True)
    (other / "config.yaml").write_text((run / "config.yaml").read_text()
                                       .replace("seed_everything: 1", "seed_everything: 2"))
    before = {path: path.stat().st_mtime_ns for path in other.rglob("*")}
    export.main([str(old), "--out", str(new)])
    for source in (run, old, new):
        error = refused([*TINY, "--resume", str(source), "--run_dir", str(other)], capsys)
        assert f"error: {other} holds another run than the checkpoint {run if source != new else new}" in error
        assert f"--resume {other}), or name another folder (--run_dir runs/NAME)" in error
    assert {path: path.stat().st_mtime_ns for path in other.rglob("*")} == before
    shutil.copytree(run, tmp_path / "same", symlinks=True)
    for source in (new, tmp_path / "same/checkpoints/step=000003.ckpt", "auto"):
        pretrain.main(["--resume", str(source), "--run_dir", str(tmp_path / "same")])
    starts = json.loads((tmp_path / "same/environment.json").read_text())
    assert [start["resumed_step"] for start in starts] == [None, 3, 3, 6] and starts[1]["resumed_from"] == str(new)


def test_auto_goes_on_in_a_folder_named_as_people_name_it(run: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copytree(run, tmp_path / "runs/a", symlinks=True)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "./runs/a", "link/a", str(tmp_path / "link/a")):
        pretrain.main(["--resume", "auto", "--run_dir", name])
    starts = json.loads((tmp_path / "runs/a/environment.json").read_text())
    assert [start["resumed_step"] for start in starts] == [None, 6, 6, 6, 6]
    (tmp_path / "runs/a/checkpoints").rename(tmp_path / "other disk")
    (tmp_path / "runs/a/checkpoints").symlink_to(tmp_path / "other disk")
    pretrain.main(["--resume", "auto", "--run_dir", "runs/a"])


@pytest.mark.parametrize("text", ["[{", "{}", "[1]"])
def test_a_damaged_record_of_starts_is_left_as_it_is(run, tmp_path, capsys, text) -> None:
    shutil.copytree(run, tmp_path / "a", symlinks=True)
    record = tmp_path / "a/environment.json"
    record.write_text(text)
    said = refused(["--resume", str(tmp_path / "a")], capsys)
    assert f"error: {record} is no list of the run's starts in JSON" in said
    assert record.read_text() == text


def test_an_empty_group_is_named(tmp_path, capsys) -> None:
    (tmp_path / "over.yaml").write_text("checkpoint:\n")
    said = refused([*TINY, "--config", str(tmp_path / "over.yaml")], capsys)
    assert "error: a group of a configuration is empty: give it keys, or leave it out\ncheckpoint:" in said


@pytest.mark.parametrize("first", ["--run_dir", "--resume"])
def test_a_run_that_began_from_another_and_saved_nothing_begins_there_again(first, run, tmp_path, monkeypatch) -> None:
    (tmp_path / "at").mkdir()
    shutil.copytree(run, tmp_path / "at/a", symlinks=True)
    monkeypatch.chdir(tmp_path)
    begin = {"--run_dir": "at/b", "--resume": "at/a/checkpoints/step=000003.ckpt"}
    pretrain.main(["--config", "at/a/config.yaml", "--seed_everything", "5", *itertools.chain(*begin.items())])
    shutil.rmtree("at/b/checkpoints")
    pretrain.main(["--run_dir", "at/b", "--resume", "auto"])
    (tmp_path / "at").rename(tmp_path / "moved")
    shutil.rmtree("moved/b/checkpoints")
    order = sorted({key: value.replace("at/", "moved/") for key, value in begin.items()}.items(),
                   key=lambda item: item[0] != first)
    pretrain.main([*itertools.chain(*order)])
    starts = json.loads(Path("moved/b/environment.json").read_text())
    assert [start["resumed_step"] for start in starts] == [3, 3, 3]
    assert not list(Path("moved/b").glob("config.step*")), "its own configuration, in whatever order the two are given"


def test_resume_with_another_schedule(run: Path, capsys: pytest.CaptureFixture) -> None:
    error = refused(["--resume", str(run), "--trainer.max_steps", "8"], capsys)
    assert "resume with the learning_rate, schedule, warmup_steps and trainer.max_steps (6)" in error


def refused(argv: list[str], capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as stop:
        pretrain.main(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


BAD = {
    "head size": (["--model.config.d_model", "30", "--model.config.n_heads", "4"],
                  "d_model 30 is not divisible by n_heads 4"),
    "mixer": (["--model.config.mixer", "mamba"], "mixer 'mamba' is unknown"),
    "penalty": (["--model.config.penalty", "0"], "penalty is 0"),
    "pairs for the row": (["--data.n_pairs", "8", "--data.length", "12"], "n_pairs 8 does not fit length 12"),
    "pairs for the vocabulary": (["--data.n_pairs", "40", "--data.vocab_size", "32"],
                                 "n_pairs 40 does not fit vocab_size 32"),
    "batch": (["--data.global_batch_tokens", "57"], "global_batch_tokens 57 is not a whole number of rows"),
    "warm-up": (["--model.optimizer.warmup_steps", "9"], "warmup_steps 9 leaves nothing of trainer.max_steps 6"),
    "sharding without a GPU": (["--trainer.strategy", "zero3"], "needs CUDA devices"),
    "another stage": (["--config", "configs/mqar.yaml", "--config", "configs/strategy/zero3.yaml",
                       "--trainer.strategy.init_args.stage", "4"], "error: ZeRO stage is 4: use 1, 2 or 3"),
    "no steps": (["--trainer.max_steps", "-1"], "trainer.max_steps is -1"),
    "no steps, constant": (["--trainer.max_steps", "-1", "--model.optimizer.schedule", "constant"],
                           "trainer.max_steps is -1"),
    "penalty lost in rounding": (["--model.config.penalty", "1e-10"], "penalty is 1e-10: below 1e-6 rounding loses"),
    "backend": (["--model.config.backend", "cuda"], "backend 'cuda' is unknown: use one of auto, chunked"),
    "Triton without a GPU": (["--model.config.backend", "triton"], "'triton' needs CUDA devices"),
    "positions": (["--model.config.style", "paper", "--model.config.max_positions", "8"], "set max_positions to 16"),
    "positions of validation": (["--model.config.style", "paper", "--model.config.max_positions", "16",
                                 "--data.val_lengths", "[16, 64]"], "set max_positions to 64"),
    "vocabulary": (["--model.config.vocab_size", "8"], "vocab_size 8 is smaller than the data's 128"),
    "null for a number": (["--model.optimizer.eps", "null"], "error: model.optimizer.eps: expected float, got null\n"),
    "null for a switch": (["--model.config.tie_embeddings", "null"],
                          "error: model.config.tie_embeddings: expected bool, got null\n"),
    "null in the data": (["--config", "configs/longdoc-tiny.yaml", "--data.row_tokens", "null"],
                         "error: data.row_tokens: expected int, got null\n"),
    "null of several kinds": (["--data.n_pairs", "null"], "error: data.n_pairs: expected int or list, got null\n"),
    "null for a callback": (["--state_norms.rows", "null"], "error: state_norms.rows: expected int, got null\n"),
    "null for the saver": (["--checkpoint.keep_last", "null"], "error: checkpoint.keep_last: expected int, got null\n"),
    "kept every 0 steps": (["--checkpoint.keep_every_n_steps", "0"], "keep_every_n_steps 0, keep_best 1: use"),
    "a word for a number": (["--model.config.penalty", "some"],
                            "error: model.config.penalty: expected float, got some"),
    "precision": (["--trainer.precision", "8"], "'bf16-mixed'"),
    "never logged": (["--trainer.log_every_n_steps", "0"], "trainer.log_every_n_steps is 0"),
    "never validated": (["--trainer.val_check_interval", "0"], "trainer.val_check_interval is 0"),
    "validated by the clock": (["--trainer.val_check_interval", "00:00:01:00"], "a whole number of optimizer steps"),
    "clipping": (["--trainer.gradient_clip_val", "-1"], "trainer.gradient_clip_val is -1"),
    "accumulation": (["--trainer.accumulate_grad_batches", "4"], "it follows from data.global_batch_tokens"),
    "epochs": (["--trainer.max_epochs", "1"], "a run's length is trainer.max_steps alone"),
    "devices": (["--trainer.devices", "many"], "should be an int > 0"),
    "unknown field": (["--model.config.d_modle", "32"], "is not accepted; did you mean model.config.d_model? "),
    "unknown key": (["--checkpoint.every_n_steps", "32"], " or checkpoint.every_n_train_steps? python -m recipes.pre"),
    "key without its group": (["--max_steps", "32"], "--max_steps 32; did you mean trainer.max_steps? "),
    "key of another class": (["--data.source", "x"], "'source' is not accepted; another class of data takes it"),
    "a key like no other": (["--qqqxyz", "3"], "unrecognized arguments: --qqqxyz 3; python -m recipes.pretrain --pr"),
    "key of no class": (["--trainer.strategy.stage", "3"], "trainer.strategy.stage: trainer.strategy has no class yet"),
    "no configuration": (["--config", "configs/none.yaml"], "configs/none.yaml"),
    "no run": (["--resume", "runs/none"], "--resume runs/none: no such file or folder"),
    "auto where": (["--resume", "auto", "--run_dir", ""], "--resume auto looks into the run's own folder"),
    "no corpus": (["--config", "configs/longdoc-tiny.yaml", "--data.source", "[nothing/*.txt]"], "nothing/*.txt"),
    "no store": (["--config", "configs/longdoc-tiny.yaml", "--data.source", "null",
                  "--data.store", "stores/none"], "stores/none"),
}


def test_help_explains_every_field(capsys: pytest.CaptureFixture) -> None:
    for argv, told in ((["--model.config.help"], "Width of the residual stream."),
                       (["--model.optimizer.help"], "Peak learning rate."),
                       (["--data.help", "data.DocumentsDataModule"], "Folder of the token store")):
        with pytest.raises(SystemExit) as stop:
            pretrain.main(argv)
        shown = capsys.readouterr().out
        assert stop.value.code == 0 and told in shown
        fields = re.findall(r"^  --\S+(?: [^\n]*)?\n {20,}(\S+)", shown, re.MULTILINE)
        assert len(fields) > 8 and not [word for word in fields if word.startswith("(type")]


def test_null_stays_where_a_key_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "null.yaml").write_text("checkpoint: {monitor: null}\nmodel: {config: {d_ff: null}}\n")
    argv = ["--config", "configs/mqar.yaml", "--config", str(tmp_path / "null.yaml"), *TINY]
    error = refused([*argv, "--run_dir", str(tmp_path / "run")], capsys)
    assert error == "error: checkpoint.monitor: expected str, got null\n"
    with pytest.raises(SystemExit) as stop:
        pretrain.main([*argv, "--checkpoint.monitor", "val/loss", "--data.length", "null", "--print_config"])
    assert stop.value.code == 0 and yaml.safe_load(capsys.readouterr().out)["trainer"]["max_time"] is None


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_before_anything_is_written(case: str, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture) -> None:
    argv, message = BAD[case]
    base = [] if "--config" in argv else TINY
    folder = tmp_path / "run"
    assert message in refused([*base, "--run_dir", str(folder), *argv], capsys)
    assert not folder.exists()


def test_a_checkpoint_of_another_architecture(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    error = refused([*TINY, "--model.config.n_layers", "1", "--resume", str(run),
                     "--run_dir", str(tmp_path / "new")], capsys)
    assert "n_layers is 2 there, 1 here" in error
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("argv", "message"), [
    (["--data.seed", "7"], "data with seed [0], this run has [7]"),
    (["--data.n_pairs", "3"], "use the same data settings"),
    (["--data.global_batch_tokens", "256"], "rows_per_step [8], this run has [16]"),
    (["--model.optimizer.weight_decay", "0.5"], "resume with model.optimizer.weight_decay 0.01"),
])  # fmt: skip
def test_resume_with_other_settings(argv: list[str], message: str, run: Path, capsys: pytest.CaptureFixture) -> None:
    before = sorted(run.iterdir())
    assert message in refused(["--resume", str(run), *argv], capsys)
    assert sorted(run.iterdir()) == before


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/run"):
        assert "name another one" in refused([*TINY, "--run_dir", str(tmp_path / folder)], capsys)


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    held = ("import sys; from pathlib import Path; from callbacks.run_lock import claimed; "
            "lock = claimed(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()")
    other = subprocess.Popen([sys.executable, "-c", held, str(tmp_path / "run")], cwd=ROOT, text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == "held\n"
    try:
        assert "another process is training in" in refused([*TINY, "--run_dir", str(tmp_path / "run")], capsys)
    finally:
        other.communicate("")
    pretrain.main([*TINY, "--run_dir", str(tmp_path / "run")])


def test_signals_end_a_run_with_a_hint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.pretrain", *TINY, "--trainer.max_steps", "100000",
               "--trainer.val_check_interval", "100000", "--checkpoint.every_n_train_steps", "2", "--run_dir"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    runs = {}
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        folder = tmp_path / number.name
        process = subprocess.Popen([*command, str(folder)], cwd=ROOT, text=True, env=environment,
                                   stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        runs[number] = folder, code, process
    for number, (folder, code, process) in runs.items():
        begun = time.monotonic()
        while newest_complete(folder) is None and process.poll() is None and time.monotonic() - begun < 100:
            time.sleep(0.1)
        process.send_signal(number)
        _, error = process.communicate(timeout=100)
        assert process.returncode == code and f"go on with python -m recipes.pretrain --resume {folder}" in error, error
        assert "Traceback" not in error and f"is saved in {newest_complete(folder)}" in error


@pytest.mark.parametrize(("number", "nodes", "devices"), [
    (signal.SIGINT, "2", "1"), (signal.SIGTERM, "2", "1"), (signal.SIGUSR1, "2", "1"), (signal.SIGTERM, "1", "2"),
])  # fmt: skip
def test_a_process_that_waits_for_others_can_be_ended(
    number: signal.Signals, nodes: str, devices: str, tmp_path: Path
) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "NODE_RANK": "0"}
    command = [sys.executable, "-m", "recipes.pretrain", *TINY, "--trainer.num_nodes", nodes,
               "--trainer.devices", devices, "--trainer.strategy", "ddp", "--run_dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | address,
                               stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
    said = ""
    while "Initializing distributed" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    time.sleep(0.5)
    process.send_signal(number)
    rest, _ = process.communicate(timeout=40)  # until the rank that it started has ended, too
    assert process.returncode == -number and "Traceback" not in rest, said + rest
    assert not (tmp_path / "run/config.yaml").exists()


def test_ctrl_c_during_the_start_is_one_line() -> None:
    script = "import os, signal, recipes; os.kill(os.getpid(), signal.SIGINT); import torch"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")
    done = subprocess.run([sys.executable, "-c", "import recipes; 1 / 0"], cwd=ROOT, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_a_full_disk_ends_a_run_with_a_hint(run: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop, stopped_by(ValueError, folder=run):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert stop.value.code == 3
    told = ("No space left on device, free some. Complete checkpoints are whole: "
            f"go on with python -m recipes.pretrain --resume {run}\n")
    assert told in capsys.readouterr().err
    with pytest.raises(FileNotFoundError), stopped_by(ValueError, folder=run):
        raise FileNotFoundError(errno.ENOENT, "no such file")


@pytest.mark.parametrize(("argv", "said"), [
    (["--trainer.num_nodes", "2", "--trainer.strategy", "ddp"], "trainer.num_nodes is 2 and nothing starts the other"),
    (["--trainer.strategy", "foo"], "trainer.strategy is 'foo': expected auto, ddp, zero1, zero2 or zero3"),
    (["--trainer.accelerator", "gpu"], "trainer.accelerator is gpu and PyTorch finds no GPU here: give --trainer.acc"),
    (["--trainer.strategy", "zero1"], "trainer.strategy zero1 (DeepSpeed) needs CUDA devices, the accelerator here is"),
])  # fmt: skip
def test_what_nothing_here_provides_is_refused(argv, said, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name in ("NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert f"error: {said}" in refused([*TINY, *argv, "--run_dir", str(tmp_path / "run")], capsys)


def test_a_mistake_is_told_before_a_store_is_made(tmp_path: Path, capsys) -> None:
    (tmp_path / "text.txt").write_text("Some words of a document. " * 200)
    argv = ["--config", "configs/longdoc-tiny.yaml", "--data.store", str(tmp_path / "store"), "--data.source",
            f"[{tmp_path}/text.txt]", "--data.vocab_size", "300", "--data.global_batch_tokens", "512",
            "--trainer.accelerator", "cpu"]
    for more, said in ((["--data.row_tokens", "63"], "63"),
                       (["--data.row_tokens", "64", "--model.config.vocab_size", "100"], "smaller than the data's 300"),
                       (["--data.row_tokens", "64", "--data.carry_state", "true", "--model.config.mixer", "softmax"],
                        "softmax")):
        assert said in refused([*argv, *more, "--run_dir", str(tmp_path / "run")], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_finished_run_says_that_nothing_is_left(run: Path, tmp_path: Path, capsys, caplog) -> None:
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    with caplog.at_level("INFO"):
        pretrain.main(["--resume", str(tmp_path / "run")])
    assert "nothing is left to train: it is at step 6 of 6" in caplog.text + capsys.readouterr().err


def test_a_checkpoint_without_a_neutral_form_ends_with_its_message(run: Path, tmp_path: Path, monkeypatch, capsys):
    def missing(*_):
        raise ValueError("pieces of rank 1 are missing")

    monkeypatch.setattr("vla_lm.checkpoint_io._fitting", missing)
    source = run / "checkpoints/step=000003.ckpt"
    with pytest.raises(SystemExit) as stop:
        pretrain.main([*TINY, "--run_dir", str(tmp_path / "new"), "--resume", str(source)])
    error = capsys.readouterr().err
    assert stop.value.code == 3 and f"stopped: {source.resolve()} cannot be turned into the neutral form" in error
    assert "ranks need: pieces of rank 1 are missing\n" in error


@pytest.mark.parametrize("said", [
    "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version 2.28.3",
    "NCCL communicator was aborted on rank 1.",
    "[1] is setting up NCCL communicator, but store->get('0') got error: Connection reset by peer",
    "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234",
    "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 900000ms for recv operation to complete",
])  # fmt: skip
def test_a_lost_rank_ends_the_others_with_the_line_to_type_next(said, run: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop, stopped_by(ValueError, folder=run):
        raise RuntimeError(said)
    told = capsys.readouterr().err
    assert stop.value.code == 3 and told.startswith("stopped: another rank has ended, or hangs") and said[:100] in told
    assert told.endswith(f"go on with python -m recipes.pretrain --resume {run}\n")
    with pytest.raises(RuntimeError), stopped_by(ValueError, folder=run):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


class StopAt(Callback):
    """Ctrl-C that does not wait for a save."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *args) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("source", [None, "step=000003.ckpt"])
def test_an_end_before_the_first_save_says_how_to_start_again(
    source: str | None, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ["--resume", str(run / "checkpoints" / source)] if source else []
    folder, fit = tmp_path / "a run", Trainer.fit

    def interrupted(trainer: Trainer, *args, **settings) -> None:
        trainer.callbacks.append(StopAt(4 if source else 2))
        fit(trainer, *args, **settings)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(Trainer, "fit", interrupted)
        pretrain.main([*TINY, "--run_dir", str(folder), *begin])
    error = capsys.readouterr().err
    assert stop.value.code == 130 and "go on" not in error
    line = error.split("nothing was saved; start again with python -m recipes.pretrain ")[1].splitlines()[0]
    pretrain.main(shlex.split(line))  # with the first start's settings, from where it began
    steps = [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line]
    assert steps == ([4, 5, 6] if source else [1, 2, 3, 4, 5, 6]) and newest_complete(folder).name == "step=000006.ckpt"


def test_an_end_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit), stopped_by(ValueError, folder=tmp_path / "run"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "stopped by a signal: nothing was saved; start again\n"


def test_any_folder_and_any_order_of_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pretrain.main([*TINY, "--trainer.precision", "64-true"])
    config, = Path("runs").glob("mqar-*/config.yaml")
    pretrain.main([*TINY, "--config", str(config), "--run_dir", "again", "--trainer.max_steps", "4"])
    assert yaml.safe_load(Path("again/config.yaml").read_text())["trainer"]["precision"] == "64-true"
    assert newest_complete(Path("again")).name == "step=000004.ckpt"


def test_documents_without_a_held_out_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("some words in a text of no great length " * 60)
    run = tmp_path / "run"
    pretrain.main(["--config", "configs/longdoc-tiny.yaml", "--run_dir", str(run),
                   "--data.source", f"[{tmp_path}/a.txt]", "--data.store", str(tmp_path / "store"),
                   "--data.heldout", "0", "--data.vocab_size", "280", "--model.config.d_model", "16",
                   "--data.row_tokens", "32", "--data.global_batch_tokens", "128", "--trainer.max_steps", "2",
                   "--trainer.accelerator", "cpu", "--model.optimizer.warmup_steps", "0"])
    evaluate.main([str(run), "--pairs", "2", "--lengths", "16", "--rows", "8", "--device", "cpu"])
    assert "documents" not in json.loads((run / "evaluation.json").read_text())
    with pytest.raises(SystemExit) as stop:
        evaluate.main([str(run), "--device", "cpu"])
    assert stop.value.code == 2 and "holds out no document" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "a.txt").write_text("other words in another text " * 60)
    prepare.main(["--source", str(tmp_path / "a.txt"), "--out", str(tmp_path / "store"), "--heldout", "0",
                  "--vocab_size", "280"])
    with pytest.raises(SystemExit) as stop:
        evaluate.main([str(run), "--device", "cpu"])
    assert stop.value.code == 2 and "use the same data settings and store" in capsys.readouterr().err


def test_evaluate_refuses(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    for text in ("", "a: ["):
        (copy / "config.yaml").write_text(text)
        with pytest.raises(SystemExit) as stop:
            evaluate.main([str(copy), "--device", "cpu"])
        assert stop.value.code == 2 and "is not a run's configuration" in capsys.readouterr().err
    for given, said in ((["--device", "gpu"], "use auto or cpu"), (["--device", "meta"], "use auto or cpu"),
                        (["--rows", "0"], 'key "rows"'), (["--pairs", "-1", "4"], 'key "pairs" element 1'),
                        (["--batch_rows", "0"], 'key "batch_rows"'), (["--seed", "-1"], 'key "seed"')):
        with pytest.raises(SystemExit) as stop:
            evaluate.main([str(run), *given])
        assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_half_written_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lone = tmp_path / "checkpoints" / "step=000006.ckpt"
    lone.parent.mkdir()
    lone.write_bytes(newest_complete(run).read_bytes()[:1000])
    assert "was not written to the end" in refused([*TINY, "--resume", str(lone)], capsys)


@pytest.mark.parametrize("config", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_parses_and_explains_each_key(config: Path, capsys: pytest.CaptureFixture) -> None:
    run = [] if config.parent.name == "configs" else ["--config", str(ROOT / "configs/mqar.yaml")]
    with pytest.raises(SystemExit) as stop:
        pretrain.main([*run, "--config", str(config), "--print_config"])
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] > 0
    lines = config.read_text().splitlines()
    assert len(lines) < 60 and lines[0].startswith("# ")
    assert not [line for line in lines if ": " in line.split("#")[0] and "class_path" not in line and "#" not in line]


def test_lengths_beyond_learned_positions_are_left_out_of_the_grid() -> None:
    args = Namespace(pairs=[4], lengths=None, rows=4, batch_rows=4, seed=0)
    task, cells = recall_cells(args, "", {}, ModelConfig(vocab_size=128, style="paper", max_positions=128))
    assert [length for _, length, _ in cells] == [64, 128]
    assert task["left_out"] == ["length 256 is beyond the model's 128 learned positions"]
    with pytest.raises(ValueError, match="no cell of the grid fits: length 1024 is beyond"):
        recall_cells(Namespace(**vars(args) | {"lengths": [1024]}), "", {}, ModelConfig(vocab_size=128))
