"""`python -m recipes.strategies`: what it reads off runs; runs themselves are in tests/cluster."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import comparable, compared, strategies

ROOT = Path(__file__).parents[2]
CPU = ["--trainer.accelerator", "cpu"]
BOTH = [*CPU, "--strategies", "single", "ddp"]


@pytest.fixture(autouse=True)
def in_project(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def refused(argv, capsys):
    with pytest.raises(SystemExit) as end:
        strategies.main(argv)
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.err.count("error:") == 1
    return captured.err


def fake_run(folder, shift, gpu):
    folder.mkdir(parents=True)
    lines = [{"step": step, "train/loss": 5 - step / 10 + shift, "throughput/tokens_per_second": 1000.0 * step}
             for step in range(1, 6)]
    if gpu:
        lines[2]["throughput/device_memory_gb"] = 7.5
        lines.append({"step": 2, "memory/planned_gb": 7.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_numbers_of_a_run(tmp_path):
    fake_run(tmp_path / "a", 0, gpu=True)
    fake_run(tmp_path / "b", 0.45, gpu=False)
    a, b = (compared.numbers(tmp_path / name, 3) for name in "ab")
    assert a["losses"] == {4: 4.6, 5: 4.5} and a["tokens_per_second"] == 3000
    assert (a["peak_gb"], a["planned_gb"]) == (7.5, 7.0) and (b["peak_gb"], b["planned_gb"]) == (None, None)
    assert compared.apart(b, a) == pytest.approx(0.1)  # 0.45 of 4.5


def test_a_table_of_runs_and_of_what_failed(tmp_path, monkeypatch, capsys):
    commands = []

    def run(command, output):
        commands.append(command)
        folder = command[command.index("--run_dir") + 1]
        if folder.endswith("ddp"):
            output.write("error: no such device\n")
            return 2
        fake_run(tmp_path / folder.rsplit("/", 1)[1], 0.0, gpu=True)
        return 0

    monkeypatch.setattr(compared, "to_the_end", run)
    monkeypatch.setattr(comparable, "check_run", lambda *_, store: None)  # it would refuse zero1 here
    arguments = ["--config", "configs/mqar.yaml", "--strategies", "single", "zero1", "ddp", "--steps", "3",
                 "--more", "2", "--out", str(tmp_path), *CPU, "--data.seed", "7"]
    with pytest.raises(SystemExit) as end:
        strategies.main(arguments)
    said, report = capsys.readouterr().out, json.loads((tmp_path / "table.json").read_text())
    assert end.value.code == 1
    assert report["single"]["gone on"]["losses"] == {"4": 4.6, "5": 4.5}
    assert "no such device" in report["zero1"]["gone on"]["failed"] and "no such device" in report["ddp"]["failed"]
    assert "zero1: 0.0e+00" in said and "ddp: failed" in said and "exit code 2: no such device" in said
    single, again, zero1 = commands[:3]
    assert all(command[-4:] == ["--data.seed", "7", "--resume", "auto"] for command in (single, zero1))
    assert single[single.index("--trainer.devices") + 1] == "1" and zero1[zero1.index("--trainer.devices") + 1] == "2"
    assert again[-2:] == ["--resume", str(tmp_path / "single/checkpoints/step=000003.ckpt")]
    count = len(commands)
    with pytest.raises(SystemExit):
        strategies.main(arguments)
    assert len(commands) == count + 2  # only what failed is tried again


def test_a_folder_of_other_runs_is_refused(tmp_path, capsys):
    config, other, out = tmp_path / "run.yaml", tmp_path / "zero1.yaml", tmp_path / "out"
    config.write_text("a: 1")
    other.write_text("b: 1")
    assert comparable.claim(out, {"config": "run.yaml", "steps": 6}, [config])
    assert not comparable.claim(out, {"config": "run.yaml", "steps": 6}, [config, other])
    with pytest.raises(ValueError, match="another call .steps 6 there and 7 here.: give another --out"):
        comparable.claim(out, {"config": "run.yaml", "steps": 7}, [config])
    for file in (other, config):  # of all files that runs there were made of, also where this call has fewer
        comparable.claim(out, {"config": "run.yaml", "steps": 6}, [config])
        file.write_text("a: 2")
        with pytest.raises(ValueError, match=f"the file {file} has changed since.: give another --out"):
            comparable.claim(out, {"config": "run.yaml", "steps": 6}, [config, other])
        file.write_text("b: 1")
    assert "give another --out" in refused(["--config", "configs/mqar.yaml", "--out", str(out), *BOTH], capsys)


@pytest.mark.parametrize("text", ["[1]", '{"config": "conf', "{}", '{"files": [1]}', "5"])
def test_a_setting_that_says_nothing(text, tmp_path, capsys):
    (tmp_path / "setting.json").write_text(text)
    said = refused(["--config", "configs/mqar.yaml", "--out", str(tmp_path), *BOTH], capsys)
    assert f"{tmp_path / 'setting.json'} does not say what" in said and "give another --out" in said
    assert [path.name for path in tmp_path.iterdir()] == ["setting.json"]
    assert (tmp_path / "setting.json").read_text() == text


def test_a_place_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file/x"):
        assert f"--out {out} is a file" in refused(["--config", "configs/mqar.yaml", "--out", str(out), *BOTH], capsys)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("given, said", [
    (["--run_dir", "X"], "--run_dir is set by recipes.strategies"),
    (["--resume", "auto"], "--resume is set by"),
    (["--trainer.max_steps", "2"], "--trainer.max_steps is set by"),
    (["--trainer.max_steps=2"], "--trainer.max_steps is set by"),
    (["--trainer.max_st", "2"], "--trainer.max_st is set by"),  # the parser takes the start of a key
    (["--trainer.val_check_interval", "2"], "--trainer.val_check_interval is set by"),
    (["--trainer.log_every_n_steps", "10"], "--trainer.log_every_n_steps is set by"),
    (["--checkpoint.every_n_train_steps", "10"], "--checkpoint.every_n_train_steps is set by"),
    (["--trainer.devices", "1"], "--trainer.devices is set by"),
    (["--one_gpu", "--trainer.devices", "1"], "--trainer.devices is set by"),
    (["--trainer.num_nodes", "2"], "--trainer.num_nodes is set by"),
    (["--trainer.strategy", "ddp"], "--trainer.strategy is set by"),
    (["--trainer.strategy.init_args.stage=3"], "--trainer.strategy.init_args.stage is set by"),
    (["--trainer", '{"max_steps": 2}'], "--trainer is set by"),
    (["--config", "configs/strategy/ddp.yaml"], "expected one file"),
    (["-c", "configs/strategy/ddp.yaml"], "-c is set by"),
    (["--config=nowhere.yaml"], "expected one file"),
    (["--data.nonsense", "8"], "'nonsense' is not accepted"),
    (["--model.optimizer.warmup_steps", "900"], "warmup_steps 900 leaves nothing of trainer.max_steps 220"),
    (["--strategies", "single", "zero1", *CPU], "zero1 (DeepSpeed) needs CUDA devices"),
    (["--devices", "3", *BOTH], "cannot be shared evenly by 3 ranks"),
    (["--trainer.accelerator", "gpu"], "trainer.accelerator is gpu and --devices asks for 2 GPUs, this machine has 0: "
                                       "add --trainer.accelerator cpu"),
])
def test_what_is_refused_before_the_first_run(given, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compared, "to_the_end", lambda *_: pytest.fail("a run was started"))
    monkeypatch.setattr("recipes.comparable.CUDAAccelerator.auto_device_count", lambda: 0)
    assert said in refused(["--config", "configs/mqar.yaml", "--out", str(tmp_path / "out"), *given], capsys)
    assert not list(tmp_path.iterdir())


def test_fewer_gpus_than_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("recipes.comparable.CUDAAccelerator.auto_device_count", lambda: 1)
    said = refused(["--config", "configs/mqar.yaml", "--out", str(tmp_path / "out")], capsys)  # accelerator auto
    assert "accelerator is auto and --devices asks for 2 GPUs, this machine has 1: give --devices 1, or --one_g" in said


def test_ranks_that_share_a_gpu(tmp_path, monkeypatch):
    """Each is a node of one device; one process alone is started as ever."""
    monkeypatch.setattr("recipes.comparable.CUDAAccelerator.auto_device_count", lambda: 1)
    commands = []

    def run(command, output):
        commands.append(command)
        fake_run(tmp_path / Path(command[command.index("--run_dir") + 1]).name, 0.0, gpu=True)
        return 0

    monkeypatch.setattr(compared, "to_the_end", run)
    with pytest.raises(SystemExit) as end:
        strategies.main(["--config", "configs/mqar.yaml", "--strategies", "single", "zero3", "--steps", "3", "--more",
                         "2", "--out", str(tmp_path), "--one_gpu"])
    recipes = [command[2:command.index("--run_dir")] for command in commands]
    shared = ["recipes.virtual_nodes", "2"]
    assert end.value.code == 0 and recipes == [["recipes.pretrain"], shared, shared, ["recipes.pretrain"]]
    assert not any("--trainer.devices" in command for command in commands)  # virtual_nodes sets them, single.yaml 1


def test_a_first_run_that_is_refused_is_the_last(tmp_path, capsys, monkeypatch):
    """And its folder is free for the mended call."""
    codes = [2, 1, 1]

    def run(command, output):
        output.write("some notice\nerror: the first line\nand the second\n")
        return codes.pop(0)

    monkeypatch.setattr(compared, "to_the_end", run)
    arguments = ["--config", "configs/mqar.yaml", "--strategies", "single", "ddp", "--out", str(tmp_path), *CPU]
    said = refused([*arguments, "--data.seed", "7"], capsys)
    assert said == f"error: exit code 2: the first line\nand the second (see {tmp_path / 'single.log'})\n"
    assert [path.name for path in tmp_path.iterdir()] == ["single.log"] and len(codes) == 2
    with pytest.raises(SystemExit) as end:
        strategies.main([*arguments, "--model.optimizer.warmup_steps", "5"])  # one that is a person's to set
    assert end.value.code == 1 and not codes, "what fails otherwise may fail under one strategy alone"
    assert "exit code 1: and the second" in capsys.readouterr().out


def test_a_run_that_ends_early_is_not_compared(tmp_path, monkeypatch):
    def run(command, output):
        fake_run(tmp_path / "a", 0, gpu=False)
        return 0

    monkeypatch.setattr(compared, "to_the_end", run)
    assert compared.train([], tmp_path / "a", 3, 6)["failed"].startswith("it ended before step 6")
    assert not (tmp_path / "a/done").exists()


def test_the_checkpoint_between_is_kept_however_long_the_rest(tmp_path):
    arguments = ["--config", "configs/mqar.yaml", "--strategies", "single", "--steps", "2", "--more", "6", *CPU]
    with pytest.raises(SystemExit) as end:
        strategies.main([*arguments, "--out", str(tmp_path), "--data.val_rows", "8",
                         "--data.global_batch_tokens", "256"])
    assert end.value.code == 0 and (tmp_path / "single/checkpoints/step=000002.ckpt").exists()
    assert len(json.loads((tmp_path / "table.json").read_text())["single"]["gone on"]["losses"]) == 6


def test_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit):
        strategies.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"(default: {value})" in said for value in (200, 20, 2, "runs/strategies"))
    assert "twelve for the six of the default" in said and "(default: None)" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_it_starts_ends_with_it(number, tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = ("import sys; from recipes.processes import to_the_end; "
              f"to_the_end([sys.executable, '-c', {child!r}], sys.stdout)")
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT)
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(20) == (143 if number == signal.SIGTERM else -number)
    for _ in range(500):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("the child still runs")
