"""metrics.jsonl is one curve, whatever happened to the run."""

import json
import math

import pytest

from callbacks import JsonlLogger, read_metrics
from tests.callbacks.tiny import TinyData, TinyModel, trainer


def test_one_object_a_line_of_a_run(tmp_path):
    run = trainer(tmp_path, 4, logger=JsonlLogger(tmp_path), log_every_n_steps=2, val_check_interval=4)
    run.fit(TinyModel(), datamodule=TinyData())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert all(line["time"] > 1.7e9 for line in lines)
    assert [name for line in lines for name in line if "loss" in name] == ["train/loss", "train/loss", "val/loss"]


@pytest.mark.parametrize("purge", [30, None])
def test_resume_drops_what_lies_past_its_step(tmp_path, purge):
    logger = JsonlLogger(tmp_path)
    for step in (9, 19, 29, 39, 49):
        logger.log_metrics({"loss": float(step)}, step)
    logger.save()
    with open(logger.path, "a") as file:
        file.write('{"step": 60, "ti')  # killed while writing
    assert [line["step"] for line in read_metrics(logger.path)] == [10, 20, 30, 40, 50]
    resumed = JsonlLogger(tmp_path, purge)
    resumed.log_metrics({"loss": 0.5}, 39 if purge else 30)
    resumed.finalize("success")
    assert [(line["step"], line["loss"]) for line in read_metrics(logger.path)] == [
        (10, 9.0), (20, 19.0), (30, 29.0), (40 if purge else 31, 0.5)]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_non_finite_numbers_are_null(tmp_path):
    logger = JsonlLogger(tmp_path)
    logger.log_metrics({"a": math.nan, "b": math.inf, "c": 1}, 0)
    logger.finalize("success")
    line = read_metrics(logger.path)[0]
    assert line["a"] is None and line["b"] is None and line["c"] == 1 and line["step"] == 1


@pytest.mark.parametrize("broken", ["rubbish", "null", '{"val/loss": 1}'])
def test_a_broken_line_inside_is_named(broken, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{broken}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=f"line 2 is no JSON object with a step: {broken!r}. Remove that line"):
        read_metrics(tmp_path / "metrics.jsonl")
