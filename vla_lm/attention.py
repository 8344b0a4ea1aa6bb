"""The sequence-mixing layers: the linear family on `kernels.vla`, and softmax attention on PyTorch's SDPA."""

import inspect
import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import Diagnostics, State, vla, vla_step
from vla_lm.config import ModelConfig
from vla_lm.convolution import ShortConvolution
from vla_lm.mixers import MIXERS
from vla_lm.state import LayerState, Packing, where_documents


class HeadScale(nn.Module):
    """Affine weight of the head-wise RMS norm, which itself is the operator's read-out: [H, D], ones at the start."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))

    def forward(self, o: Tensor) -> Tensor:
        return o * self.weight.to(o.dtype)


class SequenceMixer(nn.Module, ABC):
    """What both families share: projections, short convolution, output norm, gate and projection.

    forward(x [B, T, d_model]) -> (y [B, T, d_model], LayerState | None, Diagnostics | None). Packed documents come as
    B = 1 with a `Packing`; states then have one row per document.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, heads = config.d_model, config.n_heads
        self.config, self.row = config, MIXERS[config.mixer]
        self.heads, self.head_dim = heads, config.head_dim
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.convolution = ShortConvolution(3 * width, config.conv_width) if config.conv_width else None
        self.to_gate = nn.Linear(width, width, bias=False) if config.output_gate else None
        self.to_out = nn.Linear(width, width, bias=False)
        if config.readout == "headwise":
            self.out_norm = HeadScale(heads, self.head_dim)
        elif config.style == "paper":
            self.out_norm = nn.LayerNorm(width)
        elif config.readout == "normalized":
            self.out_norm = nn.RMSNorm(width, eps=1e-6)
        else:
            self.out_norm = nn.Identity()

    def forward(
        self,
        x: Tensor,
        packing: Packing | None = None,
        state: LayerState | None = None,
        fresh: Tensor | None = None,
        return_state: bool = False,
        diagnostics: bool = False,
    ) -> tuple[Tensor, LayerState | None, Diagnostics | None]:
        """`fresh` (bool [N]) marks documents that begin here: their entry of `state` is not used."""
        qkv, tail = self.to_qkv(x), None
        documents = x.shape[0] if packing is None else packing.documents
        if self.convolution is not None:
            before = None if state is None else state.tail
            if fresh is not None and before is not None:
                before = before.masked_fill(fresh.view(-1, 1, 1), 0)
            qkv, tail = self.convolution(qkv, packing, before, return_state)
        q, k, v = (part.unflatten(-1, (self.heads, self.head_dim)) for part in qkv.chunk(3, dim=-1))
        o, memory, found = self.mix(x, q, k, v, packing, state, fresh, return_state, diagnostics)
        if isinstance(self.out_norm, HeadScale):
            o = self.out_norm(o).flatten(-2)
        else:
            o = self.out_norm(o.flatten(-2))
        if self.to_gate is not None:
            o = o * F.silu(self.to_gate(x))
        new_state = None
        if return_state:
            seen = torch.zeros(documents, dtype=torch.int64, device=x.device) if state is None else state.length
            if fresh is not None:
                seen = seen.masked_fill(fresh, 0)
            seen = seen + (x.shape[1] if packing is None else packing.lengths)
            new_state = LayerState(tail=tail, length=seen, **memory)
        return self.to_out(o), new_state, found

    @abstractmethod
    def mix(self, x, q, k, v, packing, state, fresh, return_state, diagnostics):
        """Mix over time: q, k, v [B, T, H, D] -> (o [B, T, H, D], fields of LayerState, Diagnostics | None)."""


class LinearMixer(SequenceMixer):
    """Every mixer with a memory matrix: VLA, its ablations, DeltaNet, linear attention, Mesa."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        width, heads = config.d_model, config.n_heads
        # On the raw key, before the feature map and after the convolution.
        self.to_penalty = nn.Linear(width, width, bias=False) if config.u_source == "projection" else None
        self.to_beta = nn.Linear(width, heads, bias=False) if config.beta != "none" else None
        self.operator = vla
        self.log_penalty = None
        if config.learn_penalty:
            self.log_penalty = nn.Parameter(torch.full((heads,), math.log(config.penalty)))
        if config.decay:
            self.to_decay = nn.Linear(width, heads, bias=False)
            # g = -rate softplus(W x + bias): rates in (1, 16), softplus(bias) in (0.001, 0.1), spread over the heads,
            # so that memories of a few tokens and of thousands exist from the start.
            steps = torch.exp(torch.rand(heads) * math.log(100) + math.log(1e-3))
            self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
            self.decay_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))

    @property
    def penalty(self) -> Tensor | float:
        """lambda_0 > 0: the configured number, or the learned value per head, [H]."""
        return self.config.penalty if self.log_penalty is None else _wide(self.log_penalty).exp()

    def mix(self, x, q, k, v, packing, state, fresh, return_state, diagnostics):
        config, row = self.config, self.row
        u = beta = g = None
        if self.to_penalty is not None:
            u = self.to_penalty(k.flatten(-2)).unflatten(-1, (self.heads, self.head_dim))
        if self.to_beta is not None:
            beta = torch.sigmoid(_wide(self.to_beta(x))) * (2 if config.beta == "double" else 1)
        if config.decay:
            g = -_wide(self.log_rate).exp() * F.softplus(_wide(self.to_decay(x)) + _wide(self.decay_bias))
        settings = dict(
            penalty=self.penalty, beta=beta, g=g, write_rule=row.write_rule, erase_key=row.erase_key,
            feature_map=config.feature_map, readout=config.readout, u_scale=config.u_scale,
        )
        if config.refresh is not None and state is not None:
            raise ValueError(
                "refresh counts tokens from a row's start, so a row cannot go on from a state: set refresh: null to "
                "carry states or to decode"
            )
        initial = None if state is None else state.memory
        if initial is not None and fresh is not None:
            initial = where_documents(fresh, self.first_state(fresh.numel(), initial.S), initial)
        if state is not None and x.shape[1] == 1 and packing is None and not torch.is_grad_enabled():
            out = vla_step(q, k, v, u, initial, **settings)
            return out.o, {"memory": out.final_state}, None
        chunk = config.chunk_size
        if diagnostics:  # they come at chunk ends: 32 to 64 of them make a curve, also of a short row
            chunk = min(chunk, 1 << max(2, (x.shape[1] // 32).bit_length() - 1))
        out = self.operator(
            q, k, v, u, **settings, refresh=config.refresh, initial_state=initial, output_final_state=return_state,
            cu_seqlens=None if packing is None else packing.host, chunk_size=chunk,
            diagnostics=diagnostics, backend=config.backend,
        )
        return out.o, {"memory": out.final_state}, out.diagnostics

    def first_state(self, documents: int, like: Tensor) -> State:
        """State before the first token, differentiable in a learned penalty; dtype and device of `like`."""
        return State.initial(
            documents, self.heads, self.head_dim, self.head_dim, self.penalty, self.row.write_rule, self.config.readout,
            dtype=like.dtype, device=like.device,
        )


class SoftmaxMixer(SequenceMixer):
    """Causal softmax attention, for comparison. Packed documents are isolated; its state is the keys and values."""

    def mix(self, x, q, k, v, packing, state, fresh, return_state, diagnostics):
        if packing is not None:
            if state is not None or return_state:
                raise ValueError(
                    "softmax attention cannot carry a state between packed rows: set carry_state: false, "
                    "or choose a mixer with a memory, such as vla"
                )
            return _packed_attention(q, k, v, packing), {"memory": None}, None
        if fresh is not None and state is not None:
            raise ValueError("softmax attention continues all rows or none: pass states without fresh")
        if state is not None:
            k, v = torch.cat((state.keys, k), 1), torch.cat((state.values, v), 1)
        queries, keys, values = (part.transpose(1, 2) for part in (q, k, v))
        new, total = q.shape[1], k.shape[1]
        if new == total:
            o = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            visible = torch.ones(new, total, dtype=torch.bool, device=x.device).tril(total - new)
            o = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
        return o.transpose(1, 2), {"memory": None, "keys": k, "values": v}, None


def _packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Causal attention within each document; q, k, v [1, B * T, H, D]."""
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        # PyTorch 2.10 and earlier name it is_causal, later ones take a window.
        taken = inspect.signature(varlen_attn).parameters
        causal = {"is_causal": True} if "is_causal" in taken else {"window_size": (-1, 0)}
        bounds = packing.cu_seqlens.int()
        longest = packing.row_length
        return varlen_attn(q[0], k[0], v[0], bounds, bounds, longest, longest, **causal)[None]
    # No document crosses a row, so a mask of one row's size is enough.
    rows = (-1, packing.row_length)
    document = packing.document.view(rows)
    visible = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    queries, keys, values = (part[0].unflatten(0, rows).transpose(1, 2) for part in (q, k, v))
    o = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
    return o.transpose(1, 2).flatten(0, 1)[None]


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def build_mixer(config: ModelConfig) -> SequenceMixer:
    """The mixing layer of a resolved configuration."""
    return SoftmaxMixer(config) if config.mixer == "softmax" else LinearMixer(config)
