"""The Triton backend: a registered forward and a backward operator around the kernels, and the way to them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels import triton_delta_rule as delta_rule
from kernels import triton_delta_rule_backward as delta_rule_backward
from kernels import triton_write_direction as write_direction
from kernels.chunked import chunked
from kernels.features import DENOMINATOR_EPS, HEAD_NORM_EPS
from kernels.state import PENALTY_RULES, Output, State
from kernels.triton_common import CHUNK, INTERPRETED, Precision, Tables, on_device_of, tables, unsupported
from kernels.triton_diagnostics import diagnostics as measured
from kernels.write_direction import checked_inverse, spd_inverse

PRECISIONS = ("bf16", "tf32", "tf32x3", "ieee")
LONG = 8192  # tokens
SMALL = 1e-3  # λ0: below it A = 1/λ0 outside the span of u leaves too little of float32 to what is inside
NAMES = ("w", "norms", "starts", "factors", "inverse", "Z", "E", "states", "z", "scales")  # kept for the backward pass


def run(call, precision: str | None = None) -> Output:
    """Run a validated `arguments.Call`.

    precision: of matmul inputs, "bf16", "tf32", "tf32x3" or "ieee"; None: bf16 for bfloat16 input, tf32 for float16,
    and for float32 what `torch.get_float32_matmul_precision()` says ("highest": tf32x3, else tf32).
    Raises ValueError for head sizes, dtypes and devices these kernels do not take, with the mend.
    """
    reason = unsupported(call)
    if reason is not None:
        raise ValueError(f"backend 'triton' takes {reason}; use backend='chunked', which takes any")
    if precision is None:
        precision = {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(call.q.dtype, "torch")
    elif precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; choose one of {', '.join(map(repr, PRECISIONS))}")
    rule, state = call.write_rule, call.initial_state
    batch, tokens, heads, dk = call.q.shape

    def line(x):
        return None if x is None else x.reshape(batch * tokens, *x.shape[2:]).contiguous()

    M0 = None
    if rule in PENALTY_RULES:
        if state is None:
            M0 = call.penalty  # of each head, times the identity
        else:
            A = state.full_penalty_inverse().flatten(0, 1)
            M0 = checked_inverse(A, state.A_rest is not None).view(-1, heads, dk, dk)
    S0 = z0 = None
    if state is not None:
        S0 = state.S.float().mT.contiguous()
        z0 = None if state.z is None else state.z.float().contiguous()
    inputs = (call.q, call.k, call.v, call.u, call.beta, call.g, M0, S0, z0)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    results = forward_op(
        line(call.q), line(call.k), line(call.v), line(call.u), line(None if rule == "linear" else call.beta),
        line(call.g), M0, S0, z0, batch, None if call.bounds is None else list(call.bounds), rule, call.erase_key,
        call.feature_map, call.readout == "normalized", 1.0 if call.u_scale == "unit" else dk ** -0.5, precision,
        small(call), keep)
    o, M_last, S_last, z_last = results[:4]
    final = diagnostics = None
    if call.output_final_state:
        final = State(S_last.mT, None, z_last if call.readout == "normalized" else None)
        if M0 is not None:
            final = final.with_penalty_inverse(spd_inverse(M_last), torch.float32)
    if call.diagnostics and call.chunk_size % CHUNK == 0:
        kept = {name: None if x.numel() == 0 else x for name, x in zip(NAMES, results[4:])}
        table = _tables(call.k.flatten(0, 1), batch, call.bounds)
        diagnostics = measured(call, table, kept, S_last, None if M0 is None else M_last)
    elif call.diagnostics:  # at other places than these kernels' own
        with torch.no_grad():
            diagnostics = chunked(replace(call, output_final_state=False)).diagnostics
    return Output(o.view(call.v.shape), final, diagnostics)


def small(call) -> bool:
    """Whether A is to be float64, for a λ0 under SMALL."""
    return call.smallest_penalty is not None and call.smallest_penalty < SMALL


def resolve(precision: str, small: bool, k: Tensor, v: Tensor) -> Precision:
    """The kernels' precisions for one word, one of PRECISIONS or "torch": as PyTorch is set for float32 matmuls. That
    is asked for here, inside the registered operators, because a compiled graph cannot ask it."""
    if small:
        p = resolve(precision, False, k, v)
        return replace(p, wide=True, reading="ieee" if INTERPRETED else "tf32x3")
    if precision == "torch":
        precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if precision == "bf16" and (INTERPRETED or min(k.shape[-1], v.shape[-1]) < 64):
        # Triton 3.6 on Hopper: `solve` with four warps is wrong for bfloat16 tiles under 64 wide (README, Faults met).
        precision = "tf32"
    if precision == "bf16":
        return Precision("bf16", "tf32", "bf16x3", "tf32", False, torch.bfloat16)
    matmul, direction = precision, "bf16x3" if precision.startswith("tf32") else precision
    if INTERPRETED:  # models neither tf32 nor bfloat16
        matmul = direction = "ieee"
    return Precision(matmul, matmul, direction, matmul, precision != "tf32", torch.float32)


def _forward_precision(precision: str, small: bool, k: Tensor, v: Tensor, u, M0, S0, rows: int, bounds, erase_key: str):
    """`resolve`, and float64 for A where a key is its own direction and the past is long: what is left of the key, 1/T
    of it, would drown in the rounding of A's largest entries, 1/λ0."""
    p = resolve(precision, small, k, v)
    longest = k.shape[0] // rows if bounds is None else max(b - a for a, b in zip(bounds, bounds[1:]))
    own = M0 is not None and u is None and erase_key == "unit"
    return replace(p, wide=True) if own and (S0 is not None or longest > LONG) else p


def _keys(q: Tensor, k: Tensor, write: write_direction.Map | None, rule: str, erase_key: str, feature_map: str):
    unit = rule != "linear" and erase_key == "unit"
    return delta_rule.Keys(q, k, None if write is None else write.w, unit, rule != "linear", feature_map)


def _map_options(rule: str, erase_key: str, feature_map: str, scale: float, precision: Precision) -> dict:
    return dict(feature_map=feature_map, scale=scale, raw=erase_key == "raw", unit=rule == "unit", precision=precision)


def _tables(k: Tensor, rows: int, bounds) -> Tables:
    stretch = write_direction.stretch_tokens(*k.shape)
    return tables(rows, k.shape[0] // rows, None if bounds is None else tuple(bounds), stretch, k.device)


@torch.library.custom_op("vla_kernels::forward", mutates_args=())
def forward_op(q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, beta: Tensor | None, g: Tensor | None,
               M0: Tensor | None, S0: Tensor | None, z0: Tensor | None, rows: int, bounds: Sequence[int] | None,
               rule: str, erase_key: str, feature_map: str, normalized: bool, u_scale: float,
               precision: str, small: bool, keep: bool) -> list[Tensor]:
    """o, M_last, S_last, z_last and what NAMES lists, on the line of tokens; empty tensors for what a rule has not.

    small: see `small`. keep: a backward pass may follow. Without it "inverse", which nothing else reads, is empty too.
    """
    p = _forward_precision(precision, small, k, v, u, M0, S0, rows, bounds, erase_key)
    table = _tables(k, rows, bounds)
    write = M_last = None
    with on_device_of(q):
        if M0 is not None:
            write, M_last = write_direction.map_forward(
                k, u, M0.contiguous(), table, **_map_options(rule, erase_key, feature_map, u_scale, p), fused=True)
        keys = _keys(q, k, write, rule, erase_key, feature_map)
        o, S_last, z_last, memory = delta_rule.memory_forward(keys, v, beta, g, S0, z0, normalized, table, p,
                                                              DENOMINATOR_EPS, HEAD_NORM_EPS, write, keep)
    E = memory.E if keys.erase else None
    mapping = (None,) * 4 if write is None else (write.w, write.norms, write.starts, write.factors)
    kept = (M_last, S_last, z_last, *mapping, memory.inverse, memory.Z, E, memory.states, memory.z, memory.scales)
    return [o, *(q.new_empty(0) if x is None else x for x in kept)]


@forward_op.register_fake
def _(q, k, v, u, beta, g, M0, S0, z0, rows, bounds, rule, erase_key, feature_map, normalized, u_scale, precision,
      small, keep):
    tokens, heads, dk = k.shape
    dv, p = v.shape[-1], _forward_precision(precision, small, k, v, u, M0, S0, rows, bounds, erase_key)
    if bounds is None:
        n, chunks = rows, rows * ((tokens // rows + CHUNK - 1) // CHUNK)
    else:
        n, chunks = len(bounds) - 1, sum(-(-(b - a) // CHUNK) for a, b in zip(bounds, bounds[1:]))
    penal, erase = M0 is not None, rule != "linear"

    def tensor(given, *shape, dtype=torch.float32):
        return q.new_empty(shape, dtype=dtype) if given else q.new_empty(0)

    return [
        torch.empty_like(v), tensor(penal, n, heads, dk, dk, dtype=torch.float64), tensor(True, n, heads, dk, dv),
        tensor(normalized, n, heads, dk), tensor(penal, tokens, heads, dk, dtype=p.store),
        tensor(penal and rule == "unit", tokens, heads),
        *(tensor(penal, *shape, dk, dtype=torch.float64 if p.wide else torch.float32)
          for shape in ((chunks, heads, dk), (tokens, heads))),
        tensor(erase and keep, chunks * heads, CHUNK, CHUNK, dtype=p.store),
        *(tensor(erase, tokens, heads, size, dtype=p.store) for size in (dk, dv)),
        tensor(True, chunks, heads, dk, dv, dtype=p.store), tensor(normalized, chunks, heads, dk),
        tensor(True, tokens, heads)]


@torch.library.custom_op("vla_kernels::backward", mutates_args=())
def backward_op(do: Tensor, dM_last: Tensor | None, dS_last: Tensor | None, dz_last: Tensor | None, q: Tensor,
                k: Tensor, v: Tensor, u: Tensor | None, beta: Tensor | None, g: Tensor | None, M0: Tensor | None,
                o: Tensor, kept: Sequence[Tensor], rows: int, bounds: Sequence[int] | None, rule: str, erase_key: str,
                feature_map: str, normalized: bool, u_scale: float, precision: str, small: bool) -> list[Tensor]:
    """dq, dk, dv, du, dbeta, dg, dM0, dS0, dz0; empty tensors for what was not given."""
    p, table = resolve(precision, small, k, v), _tables(k, rows, bounds)
    kept = {name: None if x.numel() == 0 else x for name, x in zip(NAMES, kept)}
    memory = delta_rule.Memory(kept["inverse"], kept["Z"], v if kept["E"] is None else kept["E"], kept["states"],
                               kept["z"], kept["scales"])
    write = None if M0 is None else write_direction.Map(*(kept[name] for name in ("w", "norms", "starts", "factors")))
    keys = _keys(q, k, write, rule, erase_key, feature_map)
    du = dM0 = None
    with on_device_of(q):
        do, dM_last, dS_last, dz_last = (None if x is None else x.contiguous() for x in (do, dM_last, dS_last, dz_last))
        dq, dk, dw, dv, dbeta, dg, dS0, dz0 = delta_rule_backward.memory_backward(
            do, dS_last, dz_last, keys, v, beta, g, o, memory, table, p)
        if M0 is not None:
            du, dM0 = write_direction.map_backward(
                dw, k, u, write, table, dk, dM_last, diagonal=M0.dim() == 1,
                **_map_options(rule, erase_key, feature_map, u_scale, p))
    return [q.new_empty(0) if x is None else x for x in (dq, dk, dv, du, dbeta, dg, dM0, dS0, dz0)]


@backward_op.register_fake
def _(do, dM_last, dS_last, dz_last, q, k, v, u, beta, g, M0, o, kept, rows, bounds, rule, erase_key, feature_map,
      normalized, u_scale, precision, small):
    heads, dk, dv = q.shape[1], q.shape[2], v.shape[2]
    n = rows if bounds is None else len(bounds) - 1
    like = [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, u, beta, g, M0)]
    dz0 = q.new_empty((n, heads, dk), dtype=torch.float32) if normalized else q.new_empty(0)
    return [*like, q.new_empty((n, heads, dk, dv), dtype=torch.float32), dz0]


def _setup(ctx, inputs, output):
    q, k, v, u, beta, g, M0, S0, z0, *ctx.options, _ = inputs
    ctx.save_for_backward(q, k, v, u, beta, g, M0, output[0], *output[4:])
    ctx.given = [x is not None for x in (u, beta, g, M0, S0, z0)]
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    q, k, v, u, beta, g, M0, o, *kept = ctx.saved_tensors
    do, dM_last, dS_last, dz_last = grads[:4]
    if do is None:
        do = torch.zeros_like(o)
    dq, dk, dv, *rest = backward_op(do, dM_last, dS_last, dz_last, q, k, v, u, beta, g, M0, o, kept, *ctx.options)
    rest = [x if given else None for x, given in zip(rest, ctx.given)]
    return dq, dk, dv, *rest, *[None] * (len(ctx.options) + 1)


forward_op.register_autograd(_backward, setup_context=_setup)
