"""`python -m recipes.strategies`: what it reads off runs; runs themselves are in tests/cluster."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import compared, strategies


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
    arguments = ["--config", "configs/mqar.yaml", "--strategies", "single", "zero1", "ddp", "--steps", "3",
                 "--more", "2", "--out", str(tmp_path), "--data.seed", "7"]
    with pytest.raises(SystemExit) as end:
        strategies.main(arguments)
    said, report = capsys.readouterr().out, json.loads((tmp_path / "table.json").read_text())
    assert end.value.code == 1
    assert report["single"]["gone on"]["losses"] == {"4": 4.6, "5": 4.5}
    assert "no such device" in report["zero1"]["gone on"]["failed"] and "no such device" in report["ddp"]["failed"]
    assert "zero1: 0.0e+00" in said and "ddp: failed" in said and "exit code 2: error: no such device" in said
    single, again, zero1 = commands[:3]
    assert all(command[-4:] == ["--data.seed", "7", "--resume", "auto"] for command in (single, zero1))
    assert single[single.index("--trainer.devices") + 1] == "1" and zero1[zero1.index("--trainer.devices") + 1] == "2"
    assert again[-2:] == ["--resume", str(tmp_path / "single/checkpoints/step=000003.ckpt")]
    count = len(commands)
    with pytest.raises(SystemExit):
        strategies.main(arguments)
    assert len(commands) == count + 2  # only what failed is tried again


def test_a_folder_of_other_runs_is_refused(tmp_path, capsys):
    compared.claim(tmp_path, {"config": "configs/mqar.yaml", "steps": 6})
    compared.claim(tmp_path, {"config": "configs/mqar.yaml", "steps": 6})
    with pytest.raises(ValueError, match="another call .steps 6 there and 7 here.: give another --out"):
        compared.claim(tmp_path, {"config": "configs/mqar.yaml", "steps": 7})
    for config, said in (("configs/mqar.yaml", "give another --out"),
                         ("nowhere.yaml", "no such file; give a run's configuration")):
        with pytest.raises(SystemExit) as end:
            strategies.main(["--config", config, "--out", str(tmp_path)])
        assert end.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_it_starts_ends_with_it(number, tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = ("import sys; from recipes.compared import to_the_end; "
              f"to_the_end([sys.executable, '-c', {child!r}], sys.stdout)")
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=Path(__file__).parents[2])
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
