"""Known answers for the count of floating-point operations."""

import pytest
from small import language_model

from vla_lm.config import ModelConfig
from vla_lm.module import LanguageModel


@pytest.mark.parametrize(
    ("mixer", "mixing"),
    [
        # Head size 32, chunk 64, 4 heads; per head as in the docstring of vla_lm.flops.
        ("softmax", 4 * 2 * 32 * 256),
        ("linear", 4 * (4 * 1024 + 2 * 64 * 32)),
        ("deltanet", 4 * (6 * 1024 + 4 * 64 * 32)),
        ("vla_key", 4 * (12 * 1024 + 8 * 64 * 32 + 64 * 64 / 3)),
        ("mesa", 4 * (10 * 1024 + 6 * 64 * 32 + 64 * 64 / 3)),
    ],
)
def test_paper_model(mixer, mixing):
    model = LanguageModel(ModelConfig(vocab_size=128, mixer=mixer, max_positions=256))
    beta = 128 * 4 if mixer == "deltanet" else 0
    # q, k, v, output; feed-forward; and the tied embedding as output projection.
    multiplied = 2 * (4 * 128 * 128 + beta + 2 * 128 * 256) + 128 * 128
    assert model.flops_per_token(256) == pytest.approx(6 * multiplied + 3 * 2 * mixing, rel=1e-12)


def test_convolution_gate_penalty_and_untied_head_count():
    fields = {"style": "modern", "mixer": "vla", "d_model": 16, "n_heads": 2, "d_ff": 32, "vocab_size": 13}
    model = language_model(n_layers=1, tie_embeddings=False, output_gate=True, chunk_size=64, **fields)
    # qkv, output, W_u, gate; write strength; convolution; SwiGLU; head.
    multiplied = 6 * 256 + 16 * 2 + 48 * 4 + 3 * 16 * 32 + 13 * 16
    chunk = 20  # a row shorter than the chunk is one chunk
    mixing = 2 * (12 * 64 + 8 * chunk * 8 + chunk * chunk / 3)
    assert model.flops_per_token(20) == pytest.approx(6 * multiplied + 3 * mixing, rel=1e-12)
