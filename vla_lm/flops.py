"""Analytic count of the floating-point operations of training, for the model-FLOPs utilisation."""

from torch import nn

from vla_lm.config import ModelConfig
from vla_lm.convolution import ShortConvolution
from vla_lm.mixers import MIXERS
from vla_lm.transformer import Transformer


def multiplied_parameters(model: Transformer) -> int:
    """Parameters that every token is multiplied with: matrices, convolutions, and the output projection.

    Not the embedding look-ups, positions, norms and biases. A tied embedding counts once, as output projection.
    """
    modules = (nn.Linear, ShortConvolution)
    count = sum(module.weight.numel() for module in model.modules() if isinstance(module, modules))
    return count + (model.embedding.weight.numel() if model.head is None else 0)


def mixer_flops_per_token(config: ModelConfig, row_tokens: int) -> float:
    """Forward FLOPs per token of one layer's mixing over time, projections aside.

    Per head of size d, chunk C = min(chunk_size, row_tokens), a triangle counted as half its square:

    - softmax: q k and p v over the visible half of the row: 2 d row_tokens.
    - linear: read and write of the state 4 d^2, in the chunk q k and p v 2 C d.
    - delta rule: read by q and by k, and write, 6 d^2; in the chunk q w, k w, the solve and p e, 4 C d.
    - penalty matrix, beside the delta rule: x A0, u A0 and W^T W 6 d^2; in the chunk u (A0 u), the solve, x W and its
      product with W 4 C d; the Cholesky factor C^2 / 3.
    - mesa: the penalty matrix's share (applied to q), and linear attention.
    """
    d, row = config.head_dim, MIXERS[config.mixer]
    chunk = min(config.chunk_size, row_tokens)
    if row.write_rule is None:
        return config.n_heads * 2.0 * d * row_tokens
    linear, delta = 4.0 * d * d + 2 * chunk * d, 6.0 * d * d + 4 * chunk * d
    penalty = 6.0 * d * d + 4 * chunk * d + chunk * chunk / 3
    per_rule = {"linear": linear, "fixed": delta, "mesa": linear + penalty}
    return config.n_heads * per_rule.get(row.write_rule, delta + penalty)


def training_flops_per_token(model: Transformer, row_tokens: int) -> float:
    """FLOPs of forward and backward per token of a row of `row_tokens`: 6 per multiplied parameter, 3 times the mixers.

    The backward pass counts as two forward passes; recomputation is not counted.
    """
    mixers = model.config.n_layers * mixer_flops_per_token(model.config, row_tokens)
    return 6.0 * multiplied_parameters(model) + 3.0 * mixers
