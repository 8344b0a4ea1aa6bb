"""What a rank's memory will hold in training, worked out before anything is allocated, for any number of ranks.

    print(plan_memory(ModelConfig(...), Sharding(stage=3, world_size=64), rows=1, row_tokens=8192))

Parameters, masters, gradients, optimizer states and buckets follow the sources of torch and DeepSpeed 0.19 and are
exact (tests/distributed); activations are an estimate (`block_activations`), within a quarter of what
autograd keeps. Nothing is allocated: the model is built on the meta device.
"""

import math
from dataclasses import dataclass

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import nn

from vla_lm.config import ModelConfig
from vla_lm.convolution import ShortConvolution
from vla_lm.mixers import MIXERS
from vla_lm.optimization import parameter_groups
from vla_lm.pieces import PREFETCH, gathered_at_once
from vla_lm.transformer import Transformer

FLOAT32, BF16 = 4, 2  # bytes


@dataclass(frozen=True)
class Sharding:
    """How the model lies on the ranks, with the meaning of configs/strategy/*.yaml."""

    stage: int = 0
    """ZeRO stage; 0: one process or DDP, everything whole on every rank."""
    world_size: int = 1
    """Ranks."""
    precision: str = "bf16-mixed"
    """trainer.precision: 32-true, bf16-mixed (float32 weights, bfloat16 matmuls) or bf16-true (bfloat16 parameters)."""
    offload_optimizer: bool = False
    """Masters, gradients and optimizer states of this rank in the host's memory."""
    offload_parameters: bool = False
    """ZeRO-3 alone: this rank's piece of the parameters as well."""
    reduce_bucket_size: int = 50_000_000
    """Gradients sent at once, in elements."""
    overlap_comm: bool = True
    """Two buckets under ZeRO-1 and 2."""
    persistence_threshold: int = 100_000
    """ZeRO-3: parameters of fewer elements stay whole on every rank."""
    prefetch: int = PREFETCH
    """ZeRO-3: elements of the largest block that is gathered at once."""
    live: int = 1_000_000_000
    """ZeRO-3: elements that stay gathered because they are soon used; one layer more is there at the fullest."""
    float32_sums: bool = True
    """bf16-true alone: gradients are summed over the ranks in float32 (communication_data_type fp32)."""
    bucket_view: bool = True
    """DDP: gradients lie in its buckets (gradient_as_bucket_view), else beside them."""

    @classmethod
    def of(cls, strategy: Strategy, precision: str, world_size: int) -> "Sharding":
        """The sharding of a trainer's strategy."""
        if not isinstance(strategy, DeepSpeedStrategy):
            view = not isinstance(strategy, DDPStrategy) or bool(strategy._ddp_kwargs.get("gradient_as_bucket_view"))
            return cls(0, world_size, precision, bucket_view=view)
        zero = strategy.config["zero_optimization"]
        return cls(
            zero["stage"], world_size, precision, "offload_optimizer" in zero, "offload_param" in zero,
            int(zero["reduce_bucket_size"]), bool(zero["overlap_comm"]),
            int(zero.get("stage3_param_persistence_threshold", cls.persistence_threshold)),
            int(zero.get("stage3_prefetch_bucket_size", cls.prefetch)),
            max(int(zero.get(f"stage3_max_{name}", cls.live)) for name in ("live_parameters", "reuse_distance")),
            precision != "bf16-true" or strategy.config.get("communication_data_type") == "fp32",
        )


@dataclass(frozen=True)
class Part:
    """One use of a rank's memory."""

    name: str
    """What it is."""
    bytes: int
    """How much."""
    dtype: str
    """Of what type."""
    formula: str
    """Where the number comes from."""
    host: bool = False
    """In the host's memory, not the device's."""


@dataclass(frozen=True)
class MemoryPlan:
    """The parts of a rank's memory at its fullest, the backward pass of a micro-batch."""

    parts: tuple[Part, ...]

    def bytes(self, name: str) -> int:
        """Of the part of that name, on device and host together; 0 where there is none."""
        return sum(part.bytes for part in self.parts if part.name == name)

    @property
    def device_bytes(self) -> int:
        """All that a rank's device holds."""
        return sum(part.bytes for part in self.parts if not part.host)

    @property
    def host_bytes(self) -> int:
        """What one rank trains with in the host's memory; a machine holds as many times that as it has ranks.

        The snapshot of a checkpoint comes to it, see callbacks/README.md.
        """
        return sum(part.bytes for part in self.parts if part.host)

    @property
    def largest(self) -> Part:
        """The largest part on the device."""
        return max((part for part in self.parts if not part.host), key=lambda part: part.bytes)

    def mend(self) -> str:
        """What to change first where the device is too small."""
        if self.largest.name in ("activations", "logits", "backward pass", "bfloat16 copies"):
            return ("lower data.micro_batch_rows (the global batch stays: accumulation makes up for it), or set "
                    "model.config.activation_checkpointing true")
        if self.largest.name == "buckets":
            return "lower trainer.strategy.init_args.reduce_bucket_size"
        if not self.bytes("masters"):
            return ("use ZeRO (configs/strategy/zero1, zero2 or zero3.yaml) on several ranks: without it each rank "
                    "holds all of this, however many there are; or configs/strategy/zero3-offload.yaml")
        if self.largest.name == "gathered":
            return ("gather less at a time: trainer.strategy.init_args.config {zero_optimization: "
                    "{stage3_max_live_parameters: 100000000, stage3_max_reuse_distance: 100000000}}")
        if self.bytes("gathered"):
            return "use more ranks, or configs/strategy/zero3-offload.yaml"
        return ("use a higher ZeRO stage (configs/strategy/zero2, zero3.yaml), more ranks, or "
                "configs/strategy/zero3-offload.yaml")

    def __str__(self) -> str:
        lines = [f"  {part.name:<18}{size(part.bytes):>10}  {part.dtype:<9} {'on the host: ' * part.host}{part.formula}"
                 for part in self.parts if part.bytes]  # fmt: skip
        host = f", and {size(self.host_bytes)} of the host's" if self.host_bytes else ""
        return "\n".join([*lines, f"  {'in all':<18}{size(self.device_bytes):>10}  of the device{host}"])


def size(count: float) -> str:
    """Bytes as people read them: 1.23 GB (10^9)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def plan_memory(config: ModelConfig, sharding: Sharding, rows: int, row_tokens: int, accumulation: int = 1,
                carry_state: bool = False, device: str = "cuda") -> MemoryPlan:  # fmt: skip
    """The memory of one rank (the first; ranks differ by a padding) that trains `rows` x `row_tokens` tokens at once.

    Args:
        config: the model; vocab_size must be set.
        sharding: strategy, ranks and precision.
        rows: rows of a micro-batch on this rank (data.micro_batch_rows).
        row_tokens: tokens a row.
        accumulation: micro-batches of an optimizer step.
        carry_state: whether rows hand their states on to the next step.
        device: of the training, "cuda" or "cpu"; backend auto keeps other tensors on each.
    """
    if sharding.stage not in (0, 1, 2, 3) or sharding.precision not in ("32-true", "bf16-mixed", "bf16-true"):
        raise ValueError(f"stage {sharding.stage!r}, precision {sharding.precision!r}: plans are made "
                         "for stage 0 to 3 and 32-true, bf16-mixed or bf16-true")
    with torch.device("meta"):
        model = Transformer(config)
    parts = _weights(model, sharding, accumulation) + _activations(model, sharding, rows * row_tokens, device)
    if carry_state:
        lanes = rows * accumulation
        count = lanes * config.n_layers * state_bytes(model.config, sharding.precision)
        parts.append(Part("carried states", count, "float32", f"S, A and the convolution's tail of {lanes} lanes"))
    return MemoryPlan(tuple(parts))


def _weights(model: nn.Module, sharding: Sharding, accumulation: int) -> list[Part]:
    ranks, stage = sharding.world_size, sharding.stage
    groups = [[p.numel() for p in group["params"]] for group in parameter_groups(model, 0.0) if group["params"]]
    whole = sum(map(sum, groups))
    lean = sharding.precision == "bf16-true"
    width, kind = (BF16, "bfloat16") if lean else (FLOAT32, "float32")
    host = sharding.offload_optimizer
    if stage == 0:
        beside = 0 if sharding.bucket_view else whole
        return [
            Part("parameters", whole * width, kind, f"{whole:,} whole"),
            Part("gradients", whole * width, kind, "whole"),
            Part("optimizer states", 2 * whole * width, kind, "AdamW's exp_avg and exp_avg_sq, whole"),
            Part("buckets", beside * width, kind, "DDP's, beside the gradients: none with gradient_as_bucket_view"),
        ]
    # ZeRO-1 and 2 lay each group end to end and cut it evenly, starts aligned; ZeRO-3 cuts each parameter.
    flat = sum(math.ceil(sum(group) / (2 * ranks)) * 2 * ranks for group in groups)
    piece = flat // ranks if stage < 3 else sum(math.ceil(n / ranks) for group in groups for n in group)
    share = f"1/{ranks} of {whole:,}"
    masters = Part("masters", piece * FLOAT32, "float32", share, host)
    how = f"AdamW's exp_avg and exp_avg_sq, {share}"
    states = Part("optimizer states", 2 * piece * FLOAT32, "float32", how, host)
    bucket = sharding.reduce_bucket_size * (2 if stage < 3 and sharding.overlap_comm else 1)
    wide = stage == 3 and sharding.float32_sums
    buckets = [Part("buckets", bucket * (FLOAT32 if wide else width), "float32" if wide else kind,
                    f"{bucket:,} elements for gradients on their way")]  # fmt: skip
    if stage == 3:
        kept = sum(n for group in groups for n in group if n < sharding.persistence_threshold)
        layer = max(sum(p.numel() for p in m.parameters()) for m in (*model.layers, model.embedding))
        gathered = min(whole - kept, sharding.live + layer)
        block = model.layers[0]
        once = sum(p.numel() for p in block.parameters()) if gathered_at_once(block, sharding.prefetch) else 0
        parameters = [
            Part("parameters", piece * width, kind, share, sharding.offload_parameters),
            Part("small parameters", kept * width, kind, f"under {sharding.persistence_threshold:,} elements, whole"),
            Part("gathered", gathered * width, kind, "whole layers that run, are to run soon, or run again soon"),
        ]
        if once:
            how = "of a block that is gathered at once, until its end"
            parameters.append(Part("block's gradients", once * width, kind, how))
    else:
        parameters = [Part("parameters", flat * width, kind, f"{whole:,} whole")]
    if lean and stage == 1 and not host:  # DeepSpeed's BF16_Optimizer
        gradients = [Part("gradients", flat * FLOAT32 + whole * BF16, "float32", "whole, and bfloat16 as they arise")]
        return [*parameters, masters, *gradients, states]
    if stage == 1 and accumulation > 1 and not host:
        gradients = [Part("gradients", whole * width, kind, "whole, until the last micro-batch")]
    else:
        gradients = [Part("gradients", piece * FLOAT32, "float32", share, host)]
    if stage < 3 and host:  # a place to copy the updated weights from, and to copy gradients to
        gradients.append(Part("offload buffers", piece * width, kind, f"updated weights, {share}", True))
    step = [Part("update", piece * FLOAT32, "float32", f"a copy of the gradients during the step, {share}", host)]
    return [*parameters, masters, *gradients, states, *step, *buckets]


def _activations(model: Transformer, sharding: Sharding, tokens: int, device: str) -> list[Part]:
    config, mixed = model.config, sharding.precision == "bf16-mixed"
    wide = FLOAT32 if sharding.precision != "bf16-true" else BF16  # of the residual stream
    narrow = FLOAT32 if sharding.precision == "32-true" else BF16  # of matmuls
    cast = mixed and sharding.stage < 3  # DeepSpeed's linear of ZeRO-3 keeps its input and weight as they were
    # As kernels.vla chooses.
    takes = device == "cuda" and config.head_dim in (16, 32, 64, 128) and config.refresh is None
    triton = config.backend == "triton" or (config.backend == "auto" and takes)
    block = round(block_activations(config, narrow, wide, cast, triton, device == "cuda") * tokens)
    entry, vocabulary = tokens * config.d_model * wide, config.vocab_size
    if config.activation_checkpointing:
        kept, how = config.n_layers * entry, f"what enters {config.n_layers} blocks"
    else:
        kept, how = config.n_layers * block, f"{config.n_layers} blocks of {size(block)}"
    kept += tokens * config.d_model * (wide + (narrow if cast else wide))  # norm and output projection
    # Kept: the log-probabilities. The backward pass adds their gradient and the logits', both float32, or a block's own
    # work, after it has computed the block again.
    logits = tokens * vocabulary * FLOAT32
    work = max(2 * logits, block * (1 + config.activation_checkpointing))
    parts = [
        Part("activations", kept, "bfloat16" if narrow == BF16 else "float32", f"{tokens:,} tokens: {how}"),
        Part("logits", logits, "float32", f"log-probabilities, {tokens:,} x {vocabulary:,}"),
        Part("backward pass", work, "float32", "gradients of the logits, or of one block"),
    ]
    if cast:
        modules = [m for m in model.layers.modules() if isinstance(m, (nn.Linear, ShortConvolution))]
        inner, head = sum(m.weight.numel() for m in modules), config.vocab_size * config.d_model
        copies, how = (inner + head) * BF16, f"of {inner + head:,} weights, by autocast"
        if config.activation_checkpointing:
            # Autocast keeps those of all blocks until the forward pass ends; a block that runs again makes its own.
            copies = head * BF16 + max(0, inner * BF16 - work)
            how = f"of {head:,} weights; of {inner:,} in blocks what is more than the backward pass, which comes after"
        parts.append(Part("bfloat16 copies", copies, "bfloat16", how))
    return parts


def block_activations(config: ModelConfig, narrow: int, wide: int, cast: bool, triton: bool, fused: bool) -> float:
    """Bytes that autograd keeps of one block, per token.

    Args:
        config: resolved.
        narrow, wide: bytes of an element in matmuls and in the residual stream.
        cast: autocast makes a copy of each linear map's input; else several maps share the norm's output.
        triton: the operator's backend, else chunked.
        fused: the convolution is the GPU's, which keeps its input; else also what comes before the SiLU.

    With d = d_model, f = d_ff: both norms' inputs 2 d wide; their outputs d for each map that reads them; convolution
    6 d, fused 3 d; penalty direction d; output norm and projection 2 d; gate 3 d; feed-forward 4 f (SwiGLU) or 2 f
    (GELU); write strength and decay 16 a head; and the operator's, `operator_activations`.
    """
    d, heads = config.d_model, config.n_heads
    readers = 1 + (config.beta != "none") + bool(config.decay) + config.output_gate
    norms = 2 * d * wide + ((readers + 1) * d * narrow if cast else 2 * d * wide)
    maps = 2 * d + ((3 if fused else 6) * d if config.conv_width else 0) + (d if config.u_source == "projection" else 0)
    maps += 3 * d if config.output_gate else 0
    inner = (2 if config.style == "paper" else 4) * config.d_ff
    normed = d * FLOAT32 if config.readout == "normalized" else 0  # the output norm is computed in float32
    return norms + normed + (maps + inner) * narrow + 16 * heads + operator_activations(config, narrow, triton)


def operator_activations(config: ModelConfig, narrow: int, triton: bool) -> float:
    """Bytes per token that the operator keeps: of `triton_backend.NAMES`, or of the chunked backend's functions."""
    d, heads, size, row = config.d_model, config.n_heads, config.head_dim, MIXERS[config.mixer]
    rule, normalized, strength = row.write_rule, config.readout == "normalized", config.beta != "none"
    if rule is None:
        return 4 * d * narrow  # q, k, v, o of scaled_dot_product_attention
    penal, erase, directions = row.penalised, rule not in ("linear", "mesa"), config.u_source == "projection"
    if triton:
        store = BF16 if narrow == BF16 and size >= 64 else FLOAT32
        start = d * size / 64  # a matrix of each head at the start of every chunk of 64 tokens
        kept = (4 + directions) * d * narrow  # q, k, v, o and u
        kept += start * store + 4 * heads  # states, scales
        kept += (d * store + 4 * heads + FLOAT32 * (start + d)) * penal  # w, norms, starts, factors
        kept += (64 * heads + 2 * d) * store * (rule != "linear")  # inverse, Z, E
        return kept + 4 * d / 64 * normalized
    chunk = d * size / config.chunk_size
    feature = config.feature_map != "identity"
    if rule == "mesa":  # reading, keys and values in float64
        return 8 * (7 * d + 2 * chunk) + 4 * d * (1 + feature)
    kept = 4 * d + 4 * chunk + 4 * d  # queries, states at chunk starts, the read-out before its norm
    kept += 4 * d * (2 if erase else 1)  # erase keys and residuals, or the values
    kept += 4 * d * (1 + strength)  # write keys, and times the write strength
    kept += 4 * d * normalized  # the sum of the keys
    if penal:  # unit keys, unit directions, W, A x and its unit vector, A at chunk starts, in float64
        kept += 8 * d * (3 + directions + (rule == "unit") + feature) + 8 * chunk
    elif erase:  # features before their unit norm
        kept += 4 * d * feature
    return kept


def state_bytes(config: ModelConfig, precision: str) -> int:
    """Bytes of one row's carried state of one layer: S, A with its rest and z in float32, the convolution's tail."""
    config = config.resolved()
    square, narrow = config.d_model * config.head_dim, FLOAT32 if precision == "32-true" else BF16
    kept = square * FLOAT32 * (3 if MIXERS[config.mixer].penalised else 1)
    kept += config.d_model * FLOAT32 * (config.readout == "normalized")
    return kept + max(0, config.conv_width - 1) * 3 * config.d_model * narrow + 8
