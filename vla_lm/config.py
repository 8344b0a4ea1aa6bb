"""Configuration of the model and of its optimisation: plain dataclasses, checked when made."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from vla_lm.mixers import MIXERS, STYLE_DEFAULTS, default_beta


@dataclass
class ModelConfig:
    """A language model: its style, its sequence mixer and its sizes.

    A field left at null takes the default of the style and mixer; `resolved()` shows the outcome.
    """

    vocab_size: int | None = None
    """Number of token ids. null: taken from the data module."""
    d_model: int = 128
    """Width of the residual stream."""
    n_layers: int = 2
    """Number of blocks (sequence mixer and feed-forward)."""
    n_heads: int = 4
    """Heads of the mixer; head size = d_model / n_heads."""
    d_ff: int | None = None
    """Inner width of the feed-forward. null: 2 d_model (paper), 8/3 d_model rounded up to a multiple of 32 (modern)."""
    style: Literal["paper", "modern"] = "paper"
    """paper: LayerNorm, GELU, learned positions. modern: RMSNorm, SwiGLU, short convolution, no positions."""
    mixer: str = "vla"
    """Sequence mixer by name, see vla_lm/mixers.py: vla, vla_key, rls, vla_v2, fixed, deltanet, gated_deltanet, linear,
    mesa, softmax."""
    max_positions: int = 512
    """Paper style: number of learned positions = the longest row or document. Modern style: not used."""
    penalty: float = 0.1
    """Initial penalty lambda_0 of every head, 1e-6 to 1e6; A_0 = I / lambda_0."""
    learn_penalty: bool = False
    """Learn lambda_0 per head (as its logarithm), from `penalty` on."""
    feature_map: Literal["elu1", "silu", "identity"] | None = None
    """Features of queries and keys. null: elu1 (paper), identity after the convolution's SiLU (modern)."""
    readout: Literal["normalized", "headwise", "none"] | None = None
    """normalized: divided by the key normaliser. headwise: RMS norm per head. none: softmax's. null: normalized
    (paper), headwise (modern)."""
    u_source: Literal["projection", "key", "none"] | None = None
    """Penalty direction: W_u k or the unit key. null: the mixer's."""
    u_scale: Literal["unit", "inverse_sqrt_d"] = "unit"
    """Length of u: 1 (the paper's text) or 1/sqrt(d) (its authors' code)."""
    refresh: tuple[int, float] | None = None
    """[every, amount]: A += amount I after every `every` tokens of a row ([20, 0.001] in the authors' code). It makes A
    depend on its own past, so the token loop runs: slow, for short rows. null: none."""
    beta: Literal["none", "unit", "double"] | None = None
    """Write strength: none (1), learned in (0, 1) or in (0, 2). null: the mixer's in this style."""
    decay: bool | None = None
    """Learned decay g of the memory, headwise readout only. null: the mixer's."""
    output_gate: bool = False
    """Multiply the mixer's output by SiLU(W_g x) before the output projection."""
    conv_width: int | None = None
    """Width of the causal depthwise convolution with SiLU on q, k, v; 0: none. null: 0 (paper), 4 (modern)."""
    chunk_size: int = 64
    """Chunk of the parallel form: changes speed and memory, not the result."""
    activation_checkpointing: bool = False
    """Keep only what enters each block, compute the block again in the backward pass: less memory,
    a third more time."""
    backend: str = "auto"
    """Implementation of the operator: auto, chunked, triton (CUDA), reference."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output projection."""
    init_std: float = 0.02
    """Standard deviation of the normal initialisation of matrices and embeddings."""

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "max_positions", "chunk_size"):
            _positive_integer(name, getattr(self, name))
        for name in ("vocab_size", "d_ff"):
            if getattr(self, name) is not None:
                _positive_integer(name, getattr(self, name))
        if self.conv_width is not None:
            if isinstance(self.conv_width, bool) or not isinstance(self.conv_width, int) or self.conv_width < 0:
                raise ValueError(f"conv_width is {self.conv_width!r}: use 0 (no convolution) or a width such as 4")
        if self.d_model % self.n_heads:
            fitting = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0]
            nearest = min(fitting, key=lambda h: abs(h - self.n_heads))
            raise ValueError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}: "
                f"use n_heads {nearest} or d_model {self.n_heads * max(1, round(self.d_model / self.n_heads))}"
            )
        if self.mixer not in MIXERS:
            raise ValueError(f"mixer {self.mixer!r} is unknown: use one of {', '.join(MIXERS)}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                shown = ", ".join("null" if choice is None else str(choice) for choice in allowed)
                raise ValueError(f"{name} {value!r} is unknown: use one of {shown}")
        if not (isinstance(self.penalty, (int, float)) and math.isfinite(self.penalty) and self.penalty > 0):
            raise ValueError(f"penalty is {self.penalty!r}: lambda_0 must be a finite number above 0, such as 0.1")
        if not 1e-6 <= self.penalty <= 1e6:
            raise ValueError(f"penalty is {self.penalty!r}: below 1e-6 rounding loses lambda_0 beside the tokens' "
                             "directions, above 1e6 those beside it: use for example 0.1")
        if not self.init_std > 0:
            raise ValueError(f"init_std is {self.init_std!r}: use a number above 0, such as 0.02")
        if not isinstance(self.activation_checkpointing, bool):
            raise ValueError(f"activation_checkpointing is {self.activation_checkpointing!r}: use true or false")
        self._check_combination()

    def _check_combination(self) -> None:
        row, full = MIXERS[self.mixer], self.resolved()
        own_beta = default_beta(self.mixer, self.style)
        if full.beta != own_beta and full.beta != "none" and "beta" not in row.knobs:
            raise ValueError(f"beta {full.beta!r} has no effect on mixer {self.mixer!r}: leave it at null")
        if full.decay and "decay" not in row.knobs:
            raise ValueError(f"decay has no effect on mixer {self.mixer!r}: leave it at null")
        if full.decay and full.readout == "normalized":
            raise ValueError("decay needs readout: headwise (the key normaliser does not decay): set readout: headwise")
        if (full.readout == "none") != (row.write_rule is None):
            mend = "leave readout at null" if row.write_rule is None else "use normalized or headwise"
            raise ValueError(f"readout {full.readout!r} does not fit mixer {self.mixer!r}: {mend}")
        if row.penalised != (full.u_source != "none") or (self.mixer == "mesa" and full.u_source != "key"):
            raise ValueError(f"u_source {full.u_source!r} does not fit mixer {self.mixer!r}: leave it at null")
        if self.refresh is not None:
            self.refresh = every, amount = tuple(self.refresh)
            if isinstance(every, bool) or not isinstance(every, int) or every < 1 or not 0 < amount < math.inf:
                raise ValueError(f"refresh is {list(self.refresh)}: use a number of tokens and an amount, "
                                 "such as [20, 0.001]")
            if not row.penalised or self.mixer == "mesa":
                raise ValueError(f"refresh has no effect on mixer {self.mixer!r}: leave it at null")
            if self.backend not in ("auto", "reference"):
                raise ValueError(f"refresh needs the token loop, backend is {self.backend!r}: leave backend at auto")
        if self.u_scale != "unit" and self.mixer == "mesa":
            raise ValueError(f"u_scale {self.u_scale!r} does not fit mixer 'mesa', whose directions are unit keys: "
                             "use unit")
        if self.learn_penalty and not row.penalised:
            raise ValueError(f"learn_penalty has no effect on mixer {self.mixer!r}, which has no penalty: set it false")

    @property
    def head_dim(self) -> int:
        """Features per head, of keys and of values."""
        return self.d_model // self.n_heads

    def resolved(self) -> "ModelConfig":
        """The same configuration with every null, but that of vocab_size, replaced by its default. Idempotent."""
        row, style = MIXERS[self.mixer], STYLE_DEFAULTS[self.style]
        defaults: dict[str, Any] = {
            "d_ff": 32 * math.ceil(style["d_ff_ratio"] * self.d_model / 32),
            "feature_map": row.feature_map or style["feature_map"],
            "readout": row.readout or style["readout"],
            "u_source": row.u_source,
            "beta": default_beta(self.mixer, self.style),
            "decay": row.decay,
            "conv_width": style["conv_width"],
        }
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing) if missing else self

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """The inverse of `to_dict`. ValueError for an unknown field."""
        return _from_dict(cls, values)


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule, a pure function of the optimizer step."""

    learning_rate: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; norms, biases, embeddings and other one-dimensional parameters have none."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine to `min_ratio`; wsd (warm-up, stable, linear decay); or constant."""
    warmup_steps: int = 300
    """Optimizer steps of linear warm-up; step s (from 0) trains at (s + 1) / warmup_steps of the peak."""
    decay_fraction: float = 0.2
    """wsd: the last share of all steps, over which the rate falls to `min_ratio`."""
    min_ratio: float = 0.0
    """Last learning rate as a share of the peak."""
    implementation: Literal["torch", "fused", "deepspeed_cpu"] = "torch"
    """Who computes the same AdamW: torch (PyTorch's own choice), fused (PyTorch's single pass, CUDA and CPU),
    deepspeed_cpu (DeepSpeed's for states offloaded to the CPU; compiled at its first use)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate is {self.learning_rate!r}: use a number above 0, such as 3e-4")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay is {self.weight_decay!r}: use 0 or more")
        self.betas = tuple(self.betas)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas!r}: use two numbers in [0, 1), such as [0.9, 0.999]")
        if not self.eps > 0:
            raise ValueError(f"eps is {self.eps!r}: use a number above 0, such as 1e-8")
        if self.schedule not in ("cosine", "wsd", "constant"):
            raise ValueError(f"schedule {self.schedule!r} is unknown: use one of cosine, wsd, constant")
        if self.implementation not in ("torch", "fused", "deepspeed_cpu"):
            raise ValueError(f"implementation {self.implementation!r} is unknown: "
                             "use one of torch, fused, deepspeed_cpu")
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps!r}: use 0 or more optimizer steps")
        for name in ("decay_fraction", "min_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}: use a share between 0 and 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for checkpoints."""
        return asdict(self) | {"betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "OptimizerConfig":
        """The inverse of `to_dict`. ValueError for an unknown field."""
        return _from_dict(cls, values)


_CHOICES: dict[str, tuple] = {
    "backend": ("auto", "chunked", "triton", "reference"),
    "style": ("paper", "modern"),
    "feature_map": (None, "elu1", "silu", "identity"),
    "readout": (None, "normalized", "headwise", "none"),
    "u_source": (None, "projection", "key", "none"),
    "u_scale": ("unit", "inverse_sqrt_d"),
    "beta": (None, "none", "unit", "double"),
    "decay": (None, True, False),
}


def _positive_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}: use a whole number of at least 1")


def _from_dict(cls, values):
    known = [field.name for field in fields(cls)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}: use {', '.join(known)}")
    return cls(**values)
