"""What ShardedStrategy tells DeepSpeed. Training under it is tested in tests/distributed."""

import json

import pytest

from vla_lm.strategy import ShardedStrategy


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
