"""`python -m recipes.benchmark`: what it measures on a CPU, what it says of the rest, and how it goes on after a kill."""

import json
import math

import pytest
import torch
from rich.console import Console

from recipes import benchmark
from recipes.benchmarks import measure, sweep
from recipes.benchmarks.ahead import compile_ahead
from recipes.benchmarks.contenders import CONTENDERS, make_inputs
from recipes.benchmarks.measure import Shape
from recipes.benchmarks.record import Record

SMALL = ["--device", "cpu", "--shapes", "1x40x2x16", "--sweep", "16", "32", "64", "--tokens", "64", "--heads", "2", "--dim", "16",
         "--decode", "20", "300", "--rows", "vla-chunked", "vla-loop", "vla", "sdpa", "deltanet"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The record of one small run."""
    out = tmp_path_factory.mktemp("benchmark") / "deep" / "record.json"
    benchmark.main([*SMALL, "--out", str(out)])
    return out


def test_rows_errors_and_reasons(written):
    report = json.loads(written.read_text())["report"]
    table = report["1x40x2x16"]
    rows = {row["row"]: row for row in table["rows"]}
    for name in ("vla-chunked", "vla-loop", "sdpa"):
        assert 0 < rows[name]["forward"]["ms"] and 0 < rows[name]["both"]["ms"], name
    assert rows["deltanet"]["forward"]["refused"] == "runs on CUDA only"
    assert "CUDA tensors only" in rows["vla"]["forward"]["refused"]
    for name in ("vla-chunked", "vla-loop"):
        assert table["errors"][name]["o"] < 1e-4 and table["errors"][name]["gradients"] < 1e-3


def test_curve_and_decoding(written):
    report = json.loads(written.read_text())["report"]
    assert list(report["sweep"]["lengths"]) == ["16", "32", "64"]
    assert set(report["sweep"]["below_sdpa_from"]) == {"vla-chunked"}
    assert written.with_suffix(".png").stat().st_size > 10_000
    short, long = report["decode"]
    assert short["state_bytes"] == long["state_bytes"] == 2 * (16 * 16 * 4 + 16 * 16 * 8)  # S float32, A float64, two heads
    assert long["cache_bytes"] == 15 * short["cache_bytes"]
    assert max(short["error"], long["error"]) < 1e-5


def test_compiling_ahead_runs_every_row_once(capsys):
    work = [(CONTENDERS[name], Shape(1, 20, 1, 16)) for name in ("sdpa", "vla-chunked", "vla", "vla-loop", "deltanet")] * 2
    failed = compile_ahead(work, torch.float32, torch.device("cpu"), "headwise", 1, Console(width=100))
    assert failed == 1  # Triton's row, which takes no CPU tensors; the loop compiles nothing, DeltaNet needs CUDA
    assert "compiling" in capsys.readouterr().out


def test_a_second_run_measures_nothing_again(written, monkeypatch, capsys):
    before = json.loads(written.read_text())["results"]
    assert all({"experiment", "B", "T", "H", "D", "dtype", "card", "versions", "result"} <= set(entry) for entry in before)

    def forbidden(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "Timer", forbidden)
    benchmark.main([*SMALL, "--out", str(written)])
    assert json.loads(written.read_text())["results"] == before
    assert "runs on CUDA only" in capsys.readouterr().out


def test_a_killed_run_keeps_what_it_has(tmp_path):
    record = Record(tmp_path / "record.json")
    record.once({"row": "a"}, lambda: {"ms": 1.0})
    with pytest.raises(KeyboardInterrupt):
        record.once({"row": "b"}, lambda: (_ for _ in ()).throw(KeyboardInterrupt))

    def missing():
        raise ModuleNotFoundError("No module named 'fla'")

    assert "not installed" in record.once({"row": "c"}, missing)["refused"]  # and not kept: it may come
    again = Record(tmp_path / "record.json")
    assert again.once({"row": "a"}, missing) == {"ms": 1.0}
    assert [entry["row"] for entry in again.entries] == ["a"]


def test_crossing():
    slow = {256: 1.0, 512: 2.0, 1024: 4.0, 2048: 8.0}
    quadratic = {256: 0.5, 512: 2.0, 1024: 8.0, 2048: 32.0}
    assert sweep.crossing(slow, quadratic) == pytest.approx(512)
    assert sweep.crossing({T: 1.5 * ms for T, ms in slow.items()}, quadratic) == pytest.approx(768)
    assert sweep.crossing(quadratic, slow) is None
    assert sweep.crossing(slow, {T: 2 * ms for T, ms in slow.items()}) == 256
    assert sweep.crossing({}, slow) is None
    assert math.isfinite(sweep.crossing({T: ms for T, ms in slow.items() if T != 512}, quadratic))


@pytest.mark.parametrize("arguments,message", [
    (["--shapes", "8x4096x16"], "shape '8x4096x16' is not of the form BxTxHxD"),
    (["--rows", "vlaa"], "no row is called 'vlaa'; choose from vla,"),
    (["--dtype", "int8"], "--dtype is 'int8'; choose bfloat16"),
    (["--sweep", "0"], "--sweep has 0: give lengths of at least 1 token"),
    (["--sweep", "1024", "--tokens", "512"], "give shorter lengths, or --tokens of at least 1024"),
    (["--compile_jobs", "-2"], "--compile_jobs is -2: give a number of processes, or 0"),
    (["--device", "tpu"], "--device is 'tpu': choose auto or cpu or cuda"),
    (["--readout", "none"], "--readout is 'none': choose headwise or normalized"),
    (["--decode", "-1"], "--decode has -1: give lengths of at least 1 token"),
    (["--decode_batch", "0"], "--decode_batch is 0: give a whole number, at least 1"),
    (["--heads", "0"], "--heads is 0: give a whole number, at least 1"),
    (["--rows"], "--rows is empty: name a row, or give --shapes with nothing after it"),
    (["--out", "."], "--out . is a folder: name a file in it, for example record.json"),
    (["--out", "figure.png"], "use figure.json"),
    (["--out", "/dev/null/record.json"], "cannot be written in /dev/null"),
])
def test_bad_input_is_one_message(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--device", "cpu", "--out", str(tmp_path / "r.json"), *arguments])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and message in told and told.startswith("error: ") and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_another_file_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "r.json").write_text('{"mine": 1}')
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cpu", "--out", str(tmp_path / "r.json")])
    assert "is not a benchmark's record" in capsys.readouterr().err
    assert (tmp_path / "r.json").read_text() == '{"mine": 1}'


def test_every_row_says_what_it_needs_without_a_gpu():
    shape, cpu = Shape(1, 20, 1, 16), torch.device("cpu")
    for row in CONTENDERS.values():
        refusal = row.refusal("forward", shape, torch.float32, cpu)
        assert (refusal == "runs on CUDA only") == (row.ours is None and row.name != "sdpa")
        if refusal is None and row.name not in ("vla", "vla-key", "mesa", "vla-recurrent"):
            call, leaves = row.prepare(make_inputs(shape, torch.float32, cpu) | {"readout": "headwise"})
            assert call().isfinite().all() and all(x.requires_grad for x in leaves)
    assert "no backward pass" in CONTENDERS["vla-recurrent"].refusal("both", shape, torch.float32, cpu)
    assert "autograd would keep" in CONTENDERS["vla-loop"].refusal("both", Shape(8, 4096, 16, 64), torch.float32, cpu)
