"""Configurations are checked when made, and say what to change."""

import pytest

from vla_lm.config import ModelConfig, OptimizerConfig
from vla_lm.mixers import MIXERS


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"d_model": 128, "n_heads": 5}, ["d_model 128", "n_heads 5", "use n_heads 4"]),
        ({"mixer": "vlaa"}, ["'vlaa'", "vla_key", "softmax"]),
        ({"style": "new"}, ["style 'new'", "paper, modern"]),
        ({"penalty": 0.0}, ["penalty is 0.0", "above 0"]),
        ({"penalty": float("nan")}, ["penalty is nan"]),
        ({"penalty": 1e-7}, ["penalty is 1e-07", "below 1e-6", "for example 0.1"]),
        ({"penalty": 2e6}, ["penalty is 2000000.0", "above 1e6"]),
        ({"d_model": 0}, ["d_model is 0", "at least 1"]),
        ({"n_layers": 2.5}, ["n_layers is 2.5"]),
        ({"conv_width": -1}, ["conv_width is -1"]),
        ({"feature_map": "relu"}, ["'relu'", "elu1"]),
        ({"decay": True}, ["readout: headwise"]),
        ({"mixer": "linear", "beta": "unit"}, ["beta 'unit'", "'linear'"]),
        ({"mixer": "softmax", "decay": True}, ["decay", "'softmax'"]),
        ({"mixer": "softmax", "readout": "headwise"}, ["readout 'headwise'", "leave readout at null"]),
        ({"mixer": "mesa", "u_source": "projection"}, ["u_source 'projection'", "'mesa'"]),
        ({"mixer": "deltanet", "learn_penalty": True}, ["learn_penalty", "'deltanet'"]),
        ({"init_std": 0.0}, ["init_std is 0.0"]),
    ],
)
def test_bad_model_configurations_name_value_and_mend(fields, told):
    with pytest.raises(ValueError) as error:
        ModelConfig(**fields)
    assert all(part in str(error.value) for part in told), str(error.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"learning_rate": 0}, "learning_rate is 0"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"betas": (0.9, 1.0)}, "betas are"),
        ({"eps": 0}, "eps is 0"),
        ({"schedule": "linear"}, "cosine, wsd, constant"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"decay_fraction": 1.5}, "decay_fraction is 1.5"),
        ({"min_ratio": -0.1}, "min_ratio is -0.1"),
    ],
)
def test_bad_optimizer_configurations_name_value_and_mend(fields, told):
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        OptimizerConfig(**fields)


@pytest.mark.parametrize("style", ["paper", "modern"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_resolves_in_both_styles_and_survives_a_round_trip(style, mixer):
    full = ModelConfig(style=style, mixer=mixer).resolved()
    assert None not in [value for name, value in full.to_dict().items() if name not in ("vocab_size", "refresh")]
    assert full.resolved() == full == ModelConfig.from_dict(full.to_dict())


def test_defaults_follow_style_and_mixer():
    paper, modern = ModelConfig().resolved(), ModelConfig(style="modern").resolved()
    assert (paper.d_ff, paper.feature_map, paper.readout, paper.beta) == (256, "elu1", "normalized", "none")
    assert (modern.readout, modern.beta, modern.conv_width, modern.d_ff) == ("headwise", "double", 4, 352)
    assert ModelConfig(mixer="deltanet").resolved().beta == "unit"
    assert ModelConfig(style="modern", mixer="fixed").resolved().beta == "none"
    assert ModelConfig(mixer="gated_deltanet").resolved().decay is True
    assert ModelConfig(mixer="vla_key").resolved().u_source == "key"


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(ValueError, match="no field widht: use vocab_size"):
        ModelConfig.from_dict({"widht": 3})
    assert OptimizerConfig.from_dict(OptimizerConfig(betas=[0.9, 0.95]).to_dict()).betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"refresh": (0, 1e-3)}, "refresh is [0, 0.001]"),
        ({"refresh": (20, 1e-3), "mixer": "linear"}, "refresh has no effect on mixer 'linear'"),
        ({"u_scale": "inverse_sqrt_d", "mixer": "mesa"}, "u_scale 'inverse_sqrt_d' does not fit mixer 'mesa'"),
        ({"refresh": (20, 1e-3), "backend": "chunked"}, "refresh needs the token loop"),
    ],
)
def test_the_authors_refresh_is_refused_where_it_cannot_be(fields, told):
    with pytest.raises(ValueError, match=told.replace("[", r"\[").replace("]", r"\]")):
        ModelConfig(**fields)
