"""configs/strategy/*.yaml over a run's configuration: what each builds. They train in tests/distributed."""

from datetime import timedelta
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from recipes import pretrain
from vla_lm.strategy import AutocastPrecision, ShardedStrategy

FOLDER = Path(__file__).parents[2] / "configs" / "strategy"
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3-lean": 3, "zero3-offload": 3}


@pytest.fixture
def build(tmp_path, monkeypatch):
    """(run's configuration, strategy's, further arguments) -> trainer, model; nothing is trained."""
    monkeypatch.chdir(tmp_path)
    found = {}

    def stop(trainer, *_):
        found["trainer"] = trainer
        raise ValueError("far enough")

    def start(run, strategy, *more):
        files = ["--config", str(FOLDER.parent / f"{run}.yaml"), "--config", str(FOLDER / f"{strategy}.yaml")]
        with pytest.raises(SystemExit):
            pretrain.main([*files, *more])
        return found["trainer"]

    monkeypatch.setattr(pretrain, "check_trainer", stop)
    return start


def test_all_of_them_are_tested():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {"single", "ddp", *STAGES}


def test_single_and_ddp(build):
    assert isinstance(build("mqar", "single").strategy, SingleDeviceStrategy)
    strategy = build("mqar", "ddp").strategy
    assert isinstance(strategy, DDPStrategy) and strategy._ddp_kwargs["gradient_as_bucket_view"] is True
    assert strategy._timeout == timedelta(minutes=15)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("run", ["mqar", "longdoc-125m"])
def test_zero(build, run, name):
    trainer = build(run, name, "--trainer.accelerator", "cpu")
    strategy, lean = trainer.strategy, name == "zero3-lean"
    assert isinstance(strategy, ShardedStrategy) and strategy._timeout == timedelta(minutes=15)
    zero = strategy.config["zero_optimization"]
    assert zero["stage"] == STAGES[name] and zero["reduce_bucket_size"] == 50_000_000 and zero["overlap_comm"]
    assert strategy.config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert ("offload_optimizer" in zero) == (name == "zero3-offload")
    assert strategy.config.get("zero_force_ds_cpu_optimizer", True) == (name != "zero3-offload")
    mixed = run == "longdoc-125m" and not lean
    assert trainer.precision == ("bf16-true" if lean else "bf16-mixed" if mixed else "32-true")
    assert isinstance(strategy.precision_plugin, AutocastPrecision) == mixed
    assert strategy.config.get("torch_autocast", {}).get("enabled", False) == mixed
    assert strategy.config.get("bf16", {"enabled": False}) == {"enabled": False}, "parameters stay float32"
