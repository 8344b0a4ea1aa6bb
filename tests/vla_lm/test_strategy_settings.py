"""What ShardedStrategy tells DeepSpeed. Training under it is tested in tests/distributed."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, StrategyRegistry
from torch import nn

from data.loader import WORKER_TIMEOUT_S
from vla_lm.strategy import ShardedStrategy, check_trainer


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_accumulated_in_float32_and_arguments_are_kept(stage):
    config = ShardedStrategy(stage=stage, overlap_comm=False).config
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["zero_optimization"]["stage"] == stage and config["zero_optimization"]["overlap_comm"] is False


def test_a_config_adds_to_the_arguments(tmp_path, monkeypatch):
    extra = {"zero_optimization": {"reduce_bucket_size": 7}, "communication_data_type": "fp32"}
    for config in (extra, str(tmp_path / "deepspeed.json")):
        (tmp_path / "deepspeed.json").write_text(json.dumps(extra))
        got = ShardedStrategy(stage=2, config=config, allgather_bucket_size=9).config
        assert got["zero_optimization"]["stage"] == 2 and got["zero_optimization"]["allgather_bucket_size"] == 9
        assert got["zero_optimization"]["reduce_bucket_size"] == 7 and got["communication_data_type"] == "fp32"
        assert got["data_types"] == {"grad_accum_dtype": "fp32"}
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(tmp_path / "deepspeed.json"))
    assert ShardedStrategy(stage=3).config["zero_optimization"]["stage"] == 3


def test_bf16_mixed_keeps_float32_weights_and_sums():
    """Lightning's own plugin would have DeepSpeed cast the parameters."""
    strategy = ShardedStrategy(stage=3)
    strategy.precision_plugin = DeepSpeedPrecision("bf16-mixed")
    assert strategy.config["torch_autocast"] == {
        "enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}  # fmt: skip
    assert strategy.config["bf16"] == {"enabled": False}
    data = {"x": torch.ones(2)}
    assert strategy.precision_plugin.convert_input(data) is data
    with strategy.precision_plugin.val_step_context():
        assert nn.Linear(2, 2)(data["x"]).dtype == torch.bfloat16


def test_which_sums_are_sent_in_bfloat16_can_be_chosen():
    listed = ["torch.nn.modules.linear.Linear"]
    strategy = ShardedStrategy(stage=3, config={"torch_autocast": {"lower_precision_safe_modules": listed}})
    strategy.precision_plugin = DeepSpeedPrecision("bf16-mixed")
    assert strategy.config["torch_autocast"]["lower_precision_safe_modules"] == listed
    assert strategy.config["torch_autocast"]["enabled"] is True


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_other_precisions_are_lightning_s(precision):
    strategy = ShardedStrategy(stage=1)
    strategy.precision_plugin = plugin = DeepSpeedPrecision(precision)
    assert strategy.precision_plugin is plugin and "torch_autocast" not in strategy.config


def test_the_engine_and_the_trainer_must_have_taken_as_many_steps():
    strategy = ShardedStrategy(stage=1)
    strategy.model = SimpleNamespace(global_steps=4, skipped_steps=0)
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(global_step=6))
    with pytest.raises(RuntimeError, match="DeepSpeed has taken 4 optimizer steps and the trainer 6"):
        strategy.optimizer_step(None, None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stage": 0}, "ZeRO stage is 0: use 1, 2 or 3"),
        ({"config": {"gradient_accumulation_steps": 4}}, "'gradient_accumulation_steps': remove it"),
        ({"config": {"optimizer": {}}}, "set model.optimizer"),
        ({"config": {"bf16": {"enabled": True}}}, "set trainer.precision"),
        ({"stage": 1, "config": {"zero_optimization": {"stage": 3}}}, "stage is 1 and the DeepSpeed config says 3"),
    ],
)
def test_settings_that_belong_elsewhere_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        ShardedStrategy(**options)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_ranks_give_up_before_half_an_hour_and_after_the_loader(name):
    """The process group gets it in `setup_distributed`, from where both libraries keep it."""
    assert WORKER_TIMEOUT_S < StrategyRegistry.get(name)._timeout.total_seconds() < 30 * 60


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy(stage=2), FSDPStrategy()])
def test_strategies_that_train_otherwise_are_refused(strategy):
    trainer = SimpleNamespace(accelerator=CUDAAccelerator(), strategy=strategy, max_steps=1, fast_dev_run=False)
    with pytest.raises(ValueError,
                       match=f"Lightning's {type(strategy).__name__}.*use auto, ddp, zero1, zero2 or zero3"):
        check_trainer(trainer, "auto")


def test_devices_without_float64_are_refused():
    with pytest.raises(ValueError, match="trainer.accelerator is mps, which has no.*use trainer.accelerator cpu"):
        check_trainer(SimpleNamespace(accelerator=SimpleNamespace(name=lambda: "mps")), "auto")


def on_cuda(folder, precision="bf16-mixed"):
    class OnCUDA(CUDAAccelerator):
        def __init__(self):
            pass

    return SimpleNamespace(accelerator=OnCUDA(), strategy=ShardedStrategy(), max_steps=9, fast_dev_run=False,
                           precision=precision, val_check_interval=3, gradient_clip_val=None, log_every_n_steps=1,
                           accumulate_grad_batches=1, max_epochs=None, limit_train_batches=1.0,
                           overfit_batches=0.0, checkpoint_callback=SimpleNamespace(dirpath=folder))


def test_a_folder_that_deepspeed_would_take_for_a_pattern_is_refused(tmp_path):
    check_trainer(on_cuda(tmp_path / "plain"), "auto")
    with pytest.raises(ValueError,
                       match=r"run_dir leads to .*lr\[3\]/checkpoints: DeepSpeed takes .* name another folder"):
        check_trainer(on_cuda(tmp_path / "lr[3]/checkpoints"), "auto")


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "transformer-engine"])
def test_a_precision_that_cannot_train_here_is_refused(tmp_path, precision):
    with pytest.raises(ValueError, match=f"precision is {precision}.*: use bf16-mixed, bf16-true, 32-true or 64-true"):
        check_trainer(on_cuda(tmp_path, precision), "auto")
