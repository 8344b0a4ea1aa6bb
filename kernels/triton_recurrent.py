"""The recurrence token by token in one launch (the paper's §3.4): for decoding, short stretches and to compare with.

One program walks one head of one sequence and holds its A, S and z in registers; where Dv is wide it is cut into
blocks, each with a program of its own that works out A again. Forward only.

A is float64, as in `step`: a float32 A under rank-one updates is off by 6e-3 after a million random tokens and by up to
0.4 on low-rank input, and one float64 matrix costs less here than a refresh. A − p pᵀ with p = A u/√δ keeps A exactly
symmetric, so A x may be summed down the columns, which needs no exchange within a warp. S is float32; z and the
norms of keys and directions are summed in float64, the head norm of o in float32.
"""

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.features import DENOMINATOR_EPS, HEAD_NORM_EPS
from kernels.state import PENALTY_RULES, Output, State
from kernels.step import step
from kernels.triton_common import feature, on_device_of, unsupported
from kernels.triton_verdict import found_right

STEP_BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # of o and S in the self-check
_verdicts: dict[tuple, bool] = {}


@triton.jit
def in_one_place(x, place):
    """x. Without this the compiler would repeat all that leads to x in each of the layouts that x is needed in."""
    return tl.gather(x, place, 0)


@triton.jit
def inverse_root(x):
    """1/√x, zero for zero."""
    return tl.where(x > 0, tl.rsqrt(tl.where(x > 0, x, 1.0)), 0.0)


@triton.jit(do_not_specialize=["T", "given"])
def recurrent_kernel(q, k, v, u, beta, g, penalty, S0, A0, z0, bounds, o, S_last, A_last, z_last, T, H, given,
                     RULE: tl.constexpr, RAW: tl.constexpr, F: tl.constexpr, SCALE: tl.constexpr,
                     NORMALIZED: tl.constexpr, KEEP: tl.constexpr, D: tl.constexpr,
                     V: tl.constexpr, BV: tl.constexpr, EPS: tl.constexpr):
    """q, k, u [tokens, H, D], v, o [tokens, H, V], beta, g [tokens, H], penalty [H]; u, beta, g and bounds may be None.

    States are S transposed [N, H, D, V], A [N, H, D, D], z [N, H, D], read if `given`; bounds [N + 1]: the sequences'
    edges, None: all are T long. Keys and directions stay as long as they come, their norms enter as numbers.
    """
    program = tl.program_id(0).to(tl.int64)
    line, block = program // (V // BV), (program % (V // BV)).to(tl.int32)  # line = sequence * H + head
    sequence, head = line // H, line % H
    if bounds is None:
        first, length = sequence * T, T
    else:
        first = tl.load(bounds + sequence)
        length = (tl.load(bounds + sequence + 1) - first).to(tl.int32)
    d, c = tl.arange(0, D), block * BV + tl.arange(0, BV)
    real = d >= 0
    matrix, square = line * (D * D), d[:, None] * D + d[None, :]
    values, memory = line * (D * V), d[:, None] * V + c[None, :]
    PENAL: tl.constexpr = RULE == "unit" or RULE == "gain"

    # Loaded in any case, if not from memory then as what they are at first: the loads settle how the tiles are spread
    # over the threads, and without them the compiler's choice spills.
    state = given != 0
    S = tl.load(S0 + values + memory, mask=state, other=0).to(tl.float32)
    z = tl.zeros([D], tl.float64)
    if NORMALIZED:
        z += tl.load(z0 + line * D + d, mask=state, other=0).to(tl.float64)
    if PENAL:
        first_A = tl.where(d[:, None] == d[None, :], 1.0 / tl.load(penalty + head), 0.0)
        A = tl.load(A0 + matrix + square, mask=state, other=first_A)

    # The next token is loaded while this one is worked on: nothing else hides that latency.
    row = first * H + head
    q_next, k_next, v_next = tl.load(q + row * D + d), tl.load(k + row * D + d), tl.load(v + row * V + c)
    if u is not None:
        u_next = tl.load(u + row * D + d)
    if beta is not None:
        beta_next = tl.load(beta + row)
    if g is not None:
        g_next = tl.load(g + row)
    for t in range(0, length):
        key = in_one_place(feature(k_next.to(tl.float64), real, F), d)
        query, e = in_one_place(feature(q_next.to(tl.float32), real, F), d), v_next.to(tl.float32)
        here, row = row, row + H
        more = t + 1 < length
        q_next = tl.load(q + row * D + d, mask=more, other=0)
        k_next = tl.load(k + row * D + d, mask=more, other=0)
        v_next = tl.load(v + row * V + c, mask=more, other=0)
        if PENAL and u is not None:
            direction = in_one_place(u_next.to(tl.float64), d)
            u_next = tl.load(u + row * D + d, mask=more, other=0)
        if beta is not None:
            strength = beta_next.to(tl.float32)
            beta_next = tl.load(beta + row, mask=more, other=0)
        if g is not None:
            S = S * tl.exp(g_next.to(tl.float32))
            g_next = tl.load(g + row, mask=more, other=0)

        squared = tl.sum(key * key, 0)
        if RAW or RULE == "linear":
            scale = squared * 0.0 + 1.0
        else:
            scale = inverse_root(squared)
        if PENAL:
            # Sherman-Morrison for the direction u SCALE/‖u‖: A −= p pᵀ rate with p = A u.
            if u is None:
                p = tl.sum(A * key[:, None], 0)
                within = squared / (SCALE * SCALE)
                across = tl.sum(p * key, 0)
            else:
                p = tl.sum(A * direction[:, None], 0)
                within = tl.sum(direction * direction, 0) / (SCALE * SCALE)
                across = tl.sum(p * direction, 0)
            root = tl.where(within > 0, inverse_root(within + across), 0.0)
            rate = root * root
            if u is None:  # the key is a multiple of u: nothing cancels
                w = p * (within * rate)
            else:  # A_t k from the A before, so that both sums over A run side by side
                w = tl.sum(A * key[:, None], 0)
                w = w - p * (tl.sum(p * key, 0) * rate)
            p = p * root
            A = A - p[:, None] * p[None, :]
            if RULE == "unit":
                w = w * inverse_root(tl.sum(w * w, 0))
            else:
                w = w * scale
        else:
            w = key * scale

        # S_t q = S̃ q + β e (w·q), so that S̃ κ and S̃ q are read side by side too.
        write, erase = w.to(tl.float32), key.to(tl.float32)
        read = tl.sum(S * query[:, None], 0)
        if RULE != "linear":
            e = e - tl.sum(S * erase[:, None], 0) * scale.to(tl.float32)
            if beta is not None:
                e = e * strength
        read += e * tl.sum(write * query, 0)
        S += write[:, None] * e[None, :]
        if NORMALIZED:
            z += key
            read = read / tl.maximum(tl.sum(query * z.to(tl.float32), 0), EPS)
        else:
            read = read / tl.sqrt(tl.sum(read * read, 0) / V + EPS)
        tl.store(o + here * V + c, read.to(o.dtype.element_ty))

    if KEEP:
        tl.store(S_last + values + memory, S)
        if block == 0:
            if NORMALIZED:
                tl.store(z_last + line * D + d, z.to(tl.float32))
            if PENAL:
                tl.store(A_last + matrix + square, A)


def launch_options(rule: str, normalized: bool, dk: int, dv: int) -> tuple[int, int]:
    """Values of a program, and its warps: as few as hold A and S with room to work, for they meet many times a token.

    A head norm needs all of Dv in one program.
    """
    block = min(dv, 64) if normalized else dv
    numbers = dk * block + (2 * dk * dk if rule in ("unit", "gain") else 0)
    warps = 1
    while warps < 8 and numbers > warps * 32 * 100:
        warps *= 2
    return block, warps


@torch.library.custom_op("vla_kernels::recurrent", mutates_args=())
def recurrent_op(q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, beta: Tensor | None, g: Tensor | None,
                 penalty: Tensor, S0: Tensor | None, A0: Tensor | None, z0: Tensor | None, bounds: Tensor | None,
                 rule: str, raw: bool, feature_map: str, normalized: bool, scale: float, keep: bool) -> list[Tensor]:
    """o and, with `keep`, S transposed, A (float64) and z after the last token; empty tensors for what there is not.

    q, k, u [B, T, H, Dk], v [B, T, H, Dv], beta, g [B, T, H], penalty [H], all contiguous. rule "unit", "gain", "fixed"
    or "linear"; u=None: the unit keys. S0 [N, H, Dk, Dv], A0 exactly symmetric, z0, all or (without a state) none.
    """
    (rows, tokens, heads, dk), dv = q.shape, v.shape[-1]
    n = rows if bounds is None else len(bounds) - 1
    o, S, A, z = _outputs(v, n, heads, dk, rule, normalized, keep)
    block, warps = launch_options(rule, normalized, dk, dv)
    with on_device_of(q):
        recurrent_kernel[(n * heads * (dv // block),)](
            q, k, v, u, beta, g, penalty, S if S0 is None else S0, A if A0 is None else A0, z if z0 is None else z0,
            bounds, o, S, A, z, tokens, heads, int(S0 is not None), RULE=rule, RAW=raw, F=feature_map, SCALE=scale,
            NORMALIZED=normalized, KEEP=keep, D=dk, V=dv, BV=block,
            EPS=DENOMINATOR_EPS if normalized else HEAD_NORM_EPS, num_warps=warps,
            maxnreg=255)  # left to itself, ptxas takes 32 registers where A does not fit and spills the rest
    return [o, S, A, z]


@recurrent_op.register_fake
def _(q, k, v, u, beta, g, penalty, S0, A0, z0, bounds, rule, raw, feature_map, normalized, scale, keep):
    n = q.shape[0] if bounds is None else bounds.shape[0] - 1
    return list(_outputs(v, n, q.shape[2], q.shape[3], rule, normalized, keep))


def _outputs(v, n, heads, dk, rule, normalized, keep):
    def tensor(given, *shape, dtype=torch.float32):
        return v.new_empty(shape if given else 0, dtype=dtype)

    return (torch.empty_like(v), tensor(keep, n, heads, dk, v.shape[-1]),
            tensor(keep and rule in ("unit", "gain"), n, heads, dk, dk, dtype=torch.float64),
            tensor(keep and normalized, n, heads, dk))


def wants_gradient(call) -> bool:
    """Whether autograd would record the call."""
    state = call.initial_state or State(None)
    tensors = (call.q, call.k, call.v, call.u, call.penalty, call.beta, call.g, state.S, state.A, state.z)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def run(call) -> Output:
    """Run a validated `arguments.Call`, forward only. ValueError for what the kernel does not do, with the mend."""
    reason = unsupported(call)
    if reason is not None:
        raise ValueError(f"backend 'recurrent' takes {reason}; use backend='chunked', which takes any")
    if wants_gradient(call):
        raise ValueError("backend 'recurrent' computes no gradient and an input requires one; call it under "
                         "torch.no_grad(), or use backend='triton' or 'chunked'")
    o, state = _forward(call, call.output_final_state)
    if state is not None and state.A is not None:
        state = state.with_penalty_inverse(state.A, torch.float32)
    diagnostics = None
    if call.diagnostics:
        from kernels.chunked import chunked

        diagnostics = chunked(replace(call, output_final_state=False)).diagnostics
    return Output(o, state, diagnostics)


def run_step(call) -> Output:
    """One token of decoding in one launch, for `step.step` where `takes_step` says so; A comes out float64 here too."""
    return Output(*_forward(call, True))


def takes_step(call) -> bool:
    """Whether `run_step` takes this validated `arguments.Call` of one token and was found right on its kind.

    As before the chunk-parallel kernels (`triton_check`), the first token of each kind is preceded by a comparison with
    PyTorch; what fails it is named in a warning and left to PyTorch.
    """
    if unsupported(call) is not None or wants_gradient(call):
        return False
    key = (call.q.device, call.q.dtype, call.q.shape[-1], call.v.shape[-1], call.write_rule, call.erase_key,
           call.feature_map, call.readout, call.u_scale, call.u is None, call.beta is None, call.g is None)
    if key not in _verdicts:
        if torch.compiler.is_compiling() or call.q.is_cuda and torch.cuda.is_current_stream_capturing():
            return True  # no place for a check
        _verdicts[key] = _check_step(call)
    return _verdicts[key]


def _check_step(call) -> bool:
    return found_right(
        step_error, call, bound=STEP_BOUNDS[call.q.dtype], device=call.q.device,
        what=f"recurrent, write rule {call.write_rule!r}, read-out {call.readout!r}, {call.q.dtype}, head sizes "
             f"{call.q.shape[-1]} and {call.v.shape[-1]}", instead="vla_step uses PyTorch for these")


def step_error(call) -> float:
    """Largest relative error of o and S over three tokens of the call's kind, against `step` in float64."""
    generator = torch.Generator(call.q.device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=call.q.device)

    heads, state, wide, worst = call.q.shape[2], None, None, 0.0
    with torch.no_grad():
        for _ in range(3):
            x = {name: draw(2, 1, heads, getattr(call, name).shape[-1]).to(call.q.dtype)
                 for name in "qkvu" if getattr(call, name) is not None}
            gates = dict(beta=draw(2, 1, heads).sigmoid(), g=-draw(2, 1, heads).abs())
            x |= {name: y for name, y in gates.items() if getattr(call, name) is not None}
            found = run_step(replace(call, **x, initial_state=state))
            truth = step(replace(call, **{name: y.double() for name, y in x.items()}, initial_state=wide))
            state, wide = found.final_state, truth.final_state
            for a, b in ((found.o, truth.o), (state.S, wide.S)):
                error = float((a - b).abs().max() / b.abs().max())
                worst = error if not error <= worst else worst  # NaN stays
    return worst


def _forward(call, keep: bool) -> tuple[Tensor, State | None]:
    rule, state = call.write_rule, call.initial_state or State(None)
    if rule == "mesa":
        rule = "gain"  # with unit keys for u its memory is G_t A_t, so S_t q is MesaNet's read-out
    normalized = call.readout == "normalized"
    S, A, z = state.S, state.A, state.z
    if A is not None and (A.dtype != torch.float64 or state.A_rest is not None):  # what `vla_step` handed out is ready
        A = state.full_penalty_inverse()
    tensors = (call.q, call.k, call.v, call.u, None if rule == "linear" else call.beta, call.g, call.penalty,
               None if S is None else S.mT, A, z)
    tensors = [None if x is None else x.contiguous() for x in tensors]
    bounds = None if call.bounds is None else _edges(call.bounds, call.q.device)
    o, S, A, z = recurrent_op(*tensors, bounds, rule, call.erase_key == "raw", call.feature_map, normalized,
                              1.0 if call.u_scale == "unit" else call.q.shape[-1] ** -0.5, keep)
    if not keep:
        return o, None
    return o, State(S.mT, A if rule in PENALTY_RULES else None, z if normalized else None)


@lru_cache(maxsize=32)
def _edges(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int64, device=device)
