"""The language model: token ids to logits, in the paper's style and in a modern one."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kernels import Diagnostics
from vla_lm.attention import build_mixer
from vla_lm.config import ModelConfig
from vla_lm.pieces import OnePiece
from vla_lm.state import LayerState, Packing


@dataclass(frozen=True)
class TransformerOutput:
    """What `Transformer.forward` returns."""

    logits: Tensor
    """[B, T, V], in the dtype of the output projection."""
    states: list[LayerState] | None = None
    """State after the last token of each row (packed: of each document), one entry per layer."""
    diagnostics: dict[str, Diagnostics] = field(default_factory=dict)
    """By layer, "layers.0" ...; empty for softmax attention."""


class TokenEmbedding(nn.Embedding):
    """Token ids to vectors, and with `unembed` vectors to logits by the same matrix.

    Both go through the module's call, so that sharding hooks gather the matrix for either.
    """

    def forward(self, x: Tensor, unembed: bool = False) -> Tensor:
        return F.linear(x, self.weight) if unembed else super().forward(x)


class SwiGLU(nn.Module):
    """W_down (SiLU(W_gate x) * W_up x), no biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.mixer_norm = _norm(config)
        self.mixer = build_mixer(config)
        self.feed_forward_norm = _norm(config)
        if config.style == "paper":
            self.feed_forward = nn.Sequential(nn.Linear(width, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, width))
        else:
            self.feed_forward = SwiGLU(width, config.d_ff)

    def forward(self, x: Tensor, **options) -> tuple[Tensor, LayerState | None, Diagnostics | None]:
        mixed, state, diagnostics = self.mixer(self.mixer_norm(x), **options)
        x = x + mixed
        return x + self.feed_forward(self.feed_forward_norm(x)), state, diagnostics


class Transformer(nn.Module):
    """Decoder-only language model whose sequence mixer is chosen by name.

    Args:
        config: the architecture.
        pieces: how its parts are put together, see `vla_lm.pieces`.

    Every matrix and embedding starts from N(0, init_std), every bias from 0, every norm weight from 1. In the modern
    style the last matrix of each branch starts from 0: a head-wise normalised read-out has length 1 whatever came in,
    and would drown the embeddings of length init_std that it is added to.
    """

    def __init__(self, config: ModelConfig, pieces: OnePiece | None = None) -> None:
        super().__init__()
        pieces = pieces or OnePiece()
        if config.vocab_size is None:
            raise ValueError("vocab_size is null: set it, or let LanguageModel take it from the data module")
        self.config = config = config.resolved()
        positions = config.max_positions if config.style == "paper" else None
        width, build = config.d_model, pieces.shard
        self.embedding = build(TokenEmbedding(config.vocab_size, width))
        self.positions = None if positions is None else build(nn.Embedding(positions, width))
        self.layers = nn.ModuleList(build(Block(config)) for _ in range(config.n_layers))
        self.norm = build(_norm(config))
        self.head = None if config.tie_embeddings else build(nn.Linear(width, config.vocab_size, bias=False))
        last = ([] if config.style == "paper"
                else [x for y in self.layers for x in (y.mixer.to_out, y.feed_forward.down)])
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                with pieces.written(module):
                    _draw(module.weight, config.init_std)
                    if any(module is x for x in last):
                        nn.init.zeros_(module.weight)
                    if getattr(module, "bias", None) is not None:
                        nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        states: list[LayerState] | None = None,
        return_states: bool = False,
        diagnostics: bool = False,
        fresh: Tensor | None = None,
    ) -> TransformerOutput:
        """Logits of every position; position t sees tokens up to t of its own document.

        Args:
            tokens: int64 [B, T].
            cu_seqlens: document boundaries over the flattened B * T tokens, integers [N + 1]; a boundary at every row
                start at least. On the host it costs no synchronisation. None: every row is one document.
            states: continue from these, one entry per layer, with B rows (packed: N documents).
            return_states: return the states after the last token.
            diagnostics: return the operator's diagnostics.
            fresh: bool [N], with `states`: documents that begin here and use no state.

        Raises:
            TypeError: tokens are not integers.
            ValueError: wrong shape, or a row longer than the learned positions.
        """
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens are {tokens.dtype}: pass token ids as int64")
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {list(tokens.shape)}: pass [batch, time]")
        if states is not None and len(states) != len(self.layers):
            raise ValueError(f"states has {len(states)} entries for {len(self.layers)} layers: pass one for each layer")
        packing = None
        if cu_seqlens is not None:
            packing = Packing.build(cu_seqlens, *tokens.shape, tokens.device)
        x = self.embedding(tokens if packing is None else tokens.reshape(1, -1))
        if self.positions is not None:
            x = x + self._position_embedding(tokens, packing, states, fresh)
        new_states, found = [], {}
        again = self.config.activation_checkpointing and torch.is_grad_enabled()
        for number, layer in enumerate(self.layers):
            # Nothing in a block draws random numbers, so no generator's state is kept for its second run.
            run = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False) if again else layer
            x, state, measured = run(
                x, packing=packing, state=None if states is None else states[number], fresh=fresh,
                return_state=return_states, diagnostics=diagnostics,
            )
            new_states.append(state)
            if measured is not None:
                found[f"layers.{number}"] = measured
        x = self.norm(x)
        logits = self.embedding(x, unembed=True) if self.head is None else self.head(x)
        return TransformerOutput(logits.view(*tokens.shape, -1), new_states if return_states else None, found)

    def compile_blocks(self) -> None:
        """Compile all but the operator with torch.compile, in place: a wrapper would put _orig_mod into every name."""
        for layer in self.layers:
            if hasattr(layer.mixer, "operator"):
                # Its hand-written backward works in place, which torch.compile cannot trace.
                layer.mixer.operator = torch.compiler.disable(layer.mixer.operator)
            layer.compile()

    def _position_embedding(self, tokens, packing, states, fresh) -> Tensor:
        limit, length = self.config.max_positions, tokens.shape[1]
        position = torch.arange(length, device=tokens.device)[None] if packing is None else packing.position[None]
        longest = length
        if states is not None:
            before = states[0].length if fresh is None else states[0].length.masked_fill(fresh, 0)
            position = position + (before[:, None] if packing is None else before[packing.document])
            longest = int(position.max()) + 1
        if longest > limit:
            raise ValueError(
                f"a row of {longest} tokens is longer than max_positions {limit}: "
                f"set max_positions to {longest} or more, or use style: modern, which has no positions"
            )
        return self.positions(position)


@torch.no_grad()
def _draw(weight: Tensor, deviation: float) -> None:
    """N(0, deviation), drawn on the host: the same on every device."""
    if not weight.is_meta:
        weight.copy_(torch.empty(weight.shape, dtype=weight.dtype, device="cpu").normal_(std=deviation))


def _norm(config: ModelConfig) -> nn.Module:
    return nn.LayerNorm(config.d_model) if config.style == "paper" else nn.RMSNorm(config.d_model, eps=1e-6)
