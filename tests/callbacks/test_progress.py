"""A line now and then without a terminal; a bar that counts optimizer steps with one."""

import io
import re

import pytest
from rich.console import Console

from callbacks import Throughput, progress_bar
from callbacks import progress as module
from callbacks.progress import StepBar, StepLines
from tests.callbacks.tiny import TinyData, TinyModel, trainer


def test_chooses_by_the_terminal(monkeypatch):
    assert isinstance(progress_bar(), StepLines)
    monkeypatch.setattr(module.sys, "stdout", type("Terminal", (), {"isatty": lambda self: True})())
    assert isinstance(progress_bar(), StepBar)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_plain_lines(tmp_path, capsys, accumulation):
    data = TinyData(step_rows=4, micro=4 // accumulation)
    trainer(tmp_path, 6, [StepLines(0.0), Throughput()], enable_progress_bar=True, log_every_n_steps=2,
            accumulate_grad_batches=accumulation, val_check_interval=3 * accumulation).fit(
        TinyModel(), datamodule=data
    )  # fmt: skip
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == [f"step {s}/6" for s in (1, 2, 3, 3, 4, 5, 6, 6)]
    assert re.fullmatch(r"step 5/6, loss \d\.\d{4}, tokens/s [\d,]+, ETA 0:00:0\d", lines[5])
    assert ["val loss" in line for line in lines] == [False, False, False, True, False, False, False, True]


def test_plain_lines_are_few(tmp_path, capsys):
    trainer(tmp_path, 6, [StepLines(3600)], enable_progress_bar=True, limit_val_batches=0).fit(
        TinyModel(), datamodule=TinyData()
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == ["step 1/6", "step 6/6"]


def test_the_bar_counts_steps_of_the_run(tmp_path, monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=150)
    monkeypatch.setattr("lightning.pytorch.callbacks.progress.rich_progress.get_console", lambda: console)
    data = TinyData(step_rows=4, micro=2)
    trainer(tmp_path, 6, [StepBar(), Throughput()], enable_progress_bar=True, accumulate_grad_batches=2,
            log_every_n_steps=2, limit_val_batches=0).fit(TinyModel(), datamodule=data)  # fmt: skip
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert "6/6" in text and "12" not in re.findall(r"\d+/(\d+) ", text)
    assert re.search(r"loss: \d\.\d{4}", text) and re.search(r"tokens/s: [\d,]+", text) and "Step" in text
