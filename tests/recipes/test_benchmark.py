"""`python -m recipes.benchmark`: what it measures on a CPU, what it says of the rest, and how it goes on after a
kill."""

import errno
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from recipes import benchmark
from recipes.benchmarks import ahead, decode, machine, measure, operators, record, sweep
from recipes.benchmarks.ahead import compile_ahead
from recipes.benchmarks.contenders import CONTENDERS, make_inputs
from recipes.benchmarks.measure import Shape
from recipes.benchmarks.record import Record
from recipes.benchmarks.request import DEFAULTS, check, parse

SMALL = ["--device", "cpu", "--shapes", "1x40x2x16", "--sweep", "16", "32", "64", "--tokens", "64", "--heads", "2",
         "--dim", "16", "--decode", "20", "300", "--rows", "vla-chunked", "vla-loop", "vla", "sdpa", "deltanet"]


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
    short, long = report["decode"]["rows"]
    # S float32, A float64, two heads
    assert short["state_bytes"] == long["state_bytes"] == 2 * (16 * 16 * 4 + 16 * 16 * 8)
    assert long["cache_bytes"] == 15 * short["cache_bytes"]
    assert max(short["error"], long["error"]) < 1e-5


def test_every_table_says_what_it_was_measured_with(written):
    report = json.loads(written.read_text())["report"]
    assert set(report) == {"1x40x2x16", "sweep", "decode"}
    for table in report.values():
        setting = table["setting"]
        assert setting["dtype"] == "float32" and setting["readout"] == "headwise" and setting["driver"] is None
        assert {"card", "versions", "commit"} <= set(setting)
    assert (report["sweep"]["heads"], report["sweep"]["dim"], report["sweep"]["tokens"]) == (2, 16, 64)


def test_a_narrower_run_keeps_the_other_tables(written, tmp_path, capsys):
    out = tmp_path / "record.json"
    out.write_text(written.read_text())
    benchmark.main([*SMALL, "--out", str(out), "--sweep", "--decode", "--rows", "sdpa"])
    before, after = (json.loads(path.read_text())["report"] for path in (written, out))
    assert [row["row"] for row in after["1x40x2x16"]["rows"]] == ["sdpa"]
    assert after["sweep"] == before["sweep"] and after["decode"] == before["decode"]
    assert f"written: {out}\n" in capsys.readouterr().out  # in full, and without a figure


def test_decoding_takes_the_readout(tmp_path):
    cpu, rows = torch.device("cpu"), {}
    for readout in ("headwise", "normalized", "normalized"):
        rows[readout] = decode.run(20, 1, 2, 16, torch.float32, cpu, readout, Record(tmp_path / "record.json"))
        assert rows[readout]["error"] < 1e-5
    assert rows["normalized"]["state_bytes"] == rows["headwise"]["state_bytes"] + 2 * 16 * 4  # z, float32
    assert [entry["readout"] for entry in Record(tmp_path / "record.json").entries] == ["headwise", "normalized"]


def test_on_cuda_decoding_times_both_in_a_graph(monkeypatch):
    monkeypatch.setattr(decode, "graph_ms", lambda call: call())
    times = decode._times(lambda: 1.0, lambda: 2.0, torch.device("cuda"))
    assert (times["graph_ms"], times["sdpa_ms"]) == (1.0, 2.0)
    row = {"past": 1, "batch": 1, "state_bytes": 1, "cache_bytes": 1, "error": 0.0}
    for numbers, header in ((times, "SDPA on its cache, in a CUDA graph, ms"),
                            ({"step_ms": 1.0, "sdpa_ms": 1.0}, "SDPA on its cache, ms")):
        assert header in [column.header for column in decode.table([row | numbers]).columns]


def test_compiling_ahead_runs_every_row_once(capsys):
    names = ("sdpa", "vla-chunked", "vla", "vla-loop", "deltanet")
    work = [(CONTENDERS[name], Shape(1, 20, 1, 16)) for name in names] * 2
    compile_ahead(work, torch.float32, torch.device("cpu"), "headwise", 1, Console(width=100))
    told = capsys.readouterr().out
    assert "compiling" in told
    # Triton's, which takes no CPU tensors; the loop compiles nothing, DeltaNet needs CUDA.
    assert "1 of 3 did not run ahead" in told


def test_compiling_ahead_gives_no_gradient_to_a_row_without_one(monkeypatch):
    enabled = {}

    def prepare(x):
        def call():
            enabled[name] = torch.is_grad_enabled()
            return x["q"] * 2
        return call, [x["q"]]

    for name in ("vla-recurrent", "sdpa"):
        monkeypatch.setitem(CONTENDERS, name, replace(CONTENDERS[name], prepare=prepare))
        ahead._once(name, Shape(1, 20, 1, 16), torch.float32, torch.device("cpu"), "headwise")
    assert enabled == {"vla-recurrent": False, "sdpa": True}


def test_a_second_run_measures_nothing_again(written, monkeypatch, capsys):
    before = json.loads(written.read_text())["results"]
    keys = {"experiment", "B", "T", "H", "D", "dtype", "card", "driver", "versions", "method", "commit", "result"}
    assert all(keys <= set(entry) for entry in before)

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


def test_what_was_refused_is_tried_again(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"results": [{"row": "a", "result": {"refused": "out of memory"}}]}))
    assert Record(path).once({"row": "a"}, lambda: {"refused": "still"}) == {"refused": "still"}
    assert Record(path).once({"row": "a"}, lambda: {"ms": 1.0}) == {"ms": 1.0}
    assert Record(path).once({"row": "a"}, lambda: {"ms": 2.0}) == {"ms": 1.0}


def test_a_change_of_the_method_is_measured_again(written, monkeypatch):
    entries = Record(written).entries
    assert {entry["experiment"] for entry in entries} == {"operator", "error", "decode"}
    assert {entry["method"] for entry in entries} == {record.method_digest()}
    monkeypatch.setattr(record, "method_digest", lambda: "another")
    measured, now = [], Record(written)
    monkeypatch.setattr(now, "save", lambda: None)
    monkeypatch.setattr(operators, "_numbers", lambda *_: measured.append(1) or {"ms": 1.0})
    operators.measure(CONTENDERS["sdpa"], Shape(1, 40, 2, 16), torch.float32, torch.device("cpu"), "headwise", now)
    assert len(measured) == 2


def test_the_digest_is_of_what_the_code_does(tmp_path):
    def of(text):
        (tmp_path / "code.py").write_text(text)
        return record.digest([tmp_path / "code.py"])

    plain = of("def f(x):\n    return x + 1\n")
    assert of('"""Module."""\n\n\ndef f(x):  # why\n    """Adds."""\n\n    return (x + 1)\n') == plain
    assert of("def f(x):\n    return x + 2\n") != plain


@pytest.mark.parametrize("changed,words", [
    (["M a.json", " M a.py"], "abc (dirty)"), (["M a.json", "?? new.py"], "abc"), ([], "abc")])
def test_the_commit_and_whether_it_is_changed(changed, words, monkeypatch):
    monkeypatch.setattr(record, "environment", lambda: {"git": {"commit": "abc", "changed_files": changed}})
    assert record.commit() == words


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert record.commit() is None


def test_the_drivers_version(monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout="580.159.04\n580.159.04\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert machine.driver_version.__wrapped__() == "580.159.04"

    def failing(*_, **__):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(subprocess, "run", failing)
    assert machine.driver_version.__wrapped__() is None


def test_each_pass_has_its_own_peak():
    row = {"row": "vla", "label": "VLA", "forward": {"ms": 1.0, "peak_bytes": 5_000_000}, "both": {"refused": "why"}}
    columns = operators.table("", [row], {}).columns
    cells = [next(iter(column.cells)) for column in columns]
    headers = [column.header for column in columns]
    assert headers[1:5] == ["forward, ms", "peak, MB", "forward + backward, ms", "peak, MB"]
    assert cells[1:5] == ["1.000", "5", "refused", ""]


def test_the_figure_names_every_row_and_its_dotted_lines(tmp_path, monkeypatch):
    def row(name, forward, both):
        passes = (("forward", forward), ("both", both))
        return {"row": name, "label": name, **{key: {"ms": ms} if ms else {"refused": "why"} for key, ms in passes}}

    found = {T: [row("vla-recurrent", 2.0, None), row("vla", 1.5, 3.0), row("sdpa", T / 100, T / 50)]
             for T in (100, 200, 400)}
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: drawn.append(self) or save(self, *args, **more))
    sweep.save_figure(found, 400, "", tmp_path / "figure.png")
    forward, both = drawn[0].axes
    assert [text.get_text() for text in both.get_legend().get_texts()] == ["vla-recurrent", "vla", "sdpa",
                                                                          "below SDPA from this T on"]
    assert both.lines[0].get_color() == forward.lines[2].get_color()  # vla's; the first two are vla-recurrent's
    assert all(len(axes.texts) == n for axes, n in ((forward, 2), (both, 1)))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_defaults_can_be_asked_for(device):
    args = parse(["--device", device], "")
    check(args)
    assert args.sweep == DEFAULTS["sweep"][device == "cpu"] and args.tokens == DEFAULTS["tokens"][device == "cpu"]
    # Of the default lengths those that divide --tokens.
    assert parse(["--device", "cpu", "--tokens", "384"], "").sweep == [64, 128]
    assert parse(["--device", "cpu", "--sweep"], "").sweep == []


def test_help_says_what_leaving_an_option_out_means(capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "null" not in told
    assert "131072 on CUDA, 64 128 256 512 on a CPU. With nothing after it: no curve." in told
    assert "Left out: benchmarks/<card>.json in the working folder" in told


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
    (["--sweep", "64", "1024", "--tokens", "512"], "--sweep has 1024, which does not divide --tokens 512"),
    (["--sweep", "100", "64", "--tokens", "512"], "give lengths that divide it, or as --tokens a multiple of 1600"),
    (["--tokens", "100"], "--sweep has 64, which does not divide --tokens 100"),
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
    (["--out", "/proc/record.json"], "--out /proc/record.json cannot be written in /proc ("),
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


def test_a_folder_in_the_figures_place(tmp_path, capsys):
    (tmp_path / "r.png").mkdir()
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cpu", "--out", str(tmp_path / "r.json")])
    assert "r.png is a folder: give the record another name" in capsys.readouterr().err


def test_every_row_says_what_it_needs_without_a_gpu():
    shape, cpu = Shape(1, 20, 1, 16), torch.device("cpu")
    for row in CONTENDERS.values():
        refusal = row.refusal("forward", shape, cpu)
        assert (refusal == "runs on CUDA only") == (row.ours is None and row.name != "sdpa")
        if refusal is None and row.name not in ("vla", "vla-key", "mesa", "vla-recurrent"):
            call, leaves = row.prepare(make_inputs(shape, torch.float32, cpu) | {"readout": "headwise"})
            assert call().isfinite().all() and all(x.requires_grad for x in leaves)
    assert "no backward pass" in CONTENDERS["vla-recurrent"].refusal("both", shape, cpu)
    assert "autograd would keep" in CONTENDERS["vla-loop"].refusal("both", Shape(8, 4096, 16, 64), cpu)


def test_two_processes_do_not_write_one_record(tmp_path):
    hold = ("import sys, pathlib; from recipes.benchmarks.record import Record; "
            "record = Record(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()")
    path = tmp_path / "record.json"
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", hold, str(path)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError,
                           match="another process writes to .*record.json: wait for it, or give another --out"):
            Record(path)
    Record(path)


def test_a_record_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch, capsys):
    record = Record(tmp_path / "record.json")
    record.once({"row": "a"}, lambda: {"ms": 1.0})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit) as stop:
        record.once({"row": "b"}, lambda: {"ms": 2.0})
    assert stop.value.code == 3 and "cannot be written (No space left on device)" in capsys.readouterr().err
    assert [entry["row"] for entry in json.loads((tmp_path / "record.json").read_text())["results"]] == ["a"]
