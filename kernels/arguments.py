"""Checks of what a caller hands to the operator, each with one message: the value, what was expected, the mend."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.features import FEATURE_MAPS
from kernels.state import PENALTY_RULES, READOUTS, WRITE_RULES, State

ERASE_KEYS = ("unit", "raw")
U_SCALES = ("unit", "inverse_sqrt_d")
PENALTIES = (1e-6, 1e6)  # λ0: o is off by what float32 rounds in any case, or less, up to 4,096 tokens of low rank
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """One validated call, the thing every backend is a function of (Call -> Output). Tensors as in `operator.vla`."""

    q: Tensor
    k: Tensor
    v: Tensor
    u: Tensor | None
    penalty: Tensor  # λ0, [H], float64
    smallest_penalty: float | None  # of them; None where they were not read
    beta: Tensor | None
    g: Tensor | None
    write_rule: str
    erase_key: str
    feature_map: str
    readout: str
    u_scale: str
    refresh: tuple[int, float] | None
    initial_state: State | None
    output_final_state: bool
    bounds: tuple[int, ...] | None  # cu_seqlens as numbers
    chunk_size: int
    diagnostics: bool

    @property
    def work_dtype(self) -> torch.dtype:
        """float64 for float64 input, else float32."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def sequences(self) -> int:
        """N: rows of the batch, or documents when packed."""
        return self.q.shape[0] if self.bounds is None else len(self.bounds) - 1


def check(q, k, v, u=None, *, penalty, beta, g, write_rule, erase_key, feature_map, readout, u_scale, refresh,
          initial_state, output_final_state, cu_seqlens, chunk_size, diagnostics) -> Call:
    """Validate the arguments of `operator.vla`. Raises ValueError, TypeError for a wrong type or dtype."""
    for name, value, allowed in (("write_rule", write_rule, WRITE_RULES), ("erase_key", erase_key, ERASE_KEYS),
                                 ("feature_map", feature_map, FEATURE_MAPS), ("readout", readout, READOUTS),
                                 ("u_scale", u_scale, U_SCALES)):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}")
    check_tensors(q, {"k": (k, "same"), "v": (v, "any width"), "u": (u, "same")}, {"beta": beta, "g": g})
    check_chunk_size(chunk_size)
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, q)
    if readout == "normalized" and g is not None:
        raise ValueError("readout 'normalized' divides by a sum that does not decay, so it cannot be combined with "
                         "the decay g; use readout='headwise', or leave g out")
    if write_rule == "mesa":
        for name, value in (("u", u), ("beta", beta), ("g", g)):
            if value is not None:
                raise ValueError(f"write_rule 'mesa' solves least squares over unit keys and takes no {name}; "
                                 f"leave {name} out, or use write_rule='gain'")
        for name, value in (("erase_key", erase_key), ("u_scale", u_scale)):
            if value != "unit":
                raise ValueError(f"write_rule 'mesa' uses unit keys; leave {name} at 'unit', or use write_rule='gain'")
    if refresh is not None:
        refresh = _check_refresh(refresh, write_rule)
    penalty, smallest = _check_penalty(penalty, q)
    call = Call(q, k, v, None if write_rule in ("fixed", "linear") else u, penalty, smallest, beta, g, write_rule,
                erase_key, feature_map, readout, u_scale, refresh, initial_state, output_final_state, bounds,
                chunk_size, diagnostics)
    if initial_state is not None:
        _check_state(initial_state, call)
    return call


def check_tensors(q, like_q: dict, per_token: dict) -> None:
    """q and its companions agree: `like_q` [B, T, H, D] ("same" D or "any width"), `per_token` [B, T, H]."""
    for name, x in {"q": q, **{name: x for name, (x, _) in like_q.items()}, **per_token}.items():
        if x is None and name in ("u", "beta", "g"):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; give a floating-point tensor")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}; convert it to float32, bfloat16, float16 or float64")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move both to one device")
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {list(q.shape)}; expected [B, T, H, D] with no dimension of size 0")
    for name, (x, width) in like_q.items():
        if x is None:
            continue
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype} and q {q.dtype}; convert them to one dtype")
        expected = list(q.shape) if width == "same" else [*q.shape[:3], x.shape[-1] if x.dim() == 4 else "Dv"]
        if list(x.shape) != expected or 0 in x.shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected {expected} to go with q {list(q.shape)}")
    for name, x in per_token.items():
        if x is not None and x.shape != q.shape[:3]:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected [B, T, H] = {list(q.shape[:3])}: "
                             "one number per token and head")


def check_chunk_size(chunk_size) -> None:
    """A positive whole number of tokens."""
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; give a positive whole number of tokens, for example 64")


def check_cu_seqlens(cu_seqlens, q: Tensor) -> tuple[int, ...]:
    """Document boundaries [0, …, T] of one packed row, strictly increasing; returned as numbers."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens is {got}; give an int32 or int64 tensor of document boundaries")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens was given with batch size {q.shape[0]}; packed documents need batch size 1: "
                         "flatten the rows to [1, B*T, H, D] and put a boundary at each row's start")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; expected [N + 1] boundaries for N documents")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != q.shape[1]:
        raise ValueError(f"cu_seqlens runs from {bounds[0]} to {bounds[-1]} and does not cover the {q.shape[1]} "
                         f"tokens; it must start at 0 and end at {q.shape[1]}")
    for n, (a, b) in enumerate(zip(bounds, bounds[1:])):
        if b <= a:
            raise ValueError(f"cu_seqlens gives document {n} the length {b - a} (from {a} to {b}); every document "
                             "needs at least one token: drop empty documents and sort the boundaries")
    return tuple(bounds)


def _check_penalty(penalty, q: Tensor) -> tuple[Tensor, float | None]:
    heads = q.shape[2]
    if isinstance(penalty, bool) or not isinstance(penalty, (int, float, Tensor)):
        raise TypeError(f"penalty is a {type(penalty).__name__}; give a positive number or a tensor [H]")
    if isinstance(penalty, Tensor):
        if penalty.dtype not in FLOATS:
            raise TypeError(f"penalty has dtype {penalty.dtype}; give a floating-point tensor [H] or a number")
        if penalty.dim() > 1 or penalty.numel() not in (1, heads):
            raise ValueError(f"penalty has shape {list(penalty.shape)}; expected [{heads}], one per head, or a number")
        if penalty.device != q.device and penalty.numel() > 1:
            raise ValueError(f"penalty is on {penalty.device} and q on {q.device}; move both to one device")
        # Reading what a GPU has still to compute would make the host wait for it, at every call of every layer.
        unread = penalty.is_cuda and (penalty.requires_grad or torch.cuda.is_current_stream_capturing())
        values = [] if unread or torch.compiler.is_compiling() else penalty.detach().reshape(-1).tolist()
    else:
        values = [penalty]
    for value in values:
        if not 0.9 * PENALTIES[0] <= value <= 1.1 * PENALTIES[1]:  # a bound itself may have been rounded to 8 bits
            raise ValueError(f"penalty (λ0) is {value}; it must be positive, from 1e-6 to 1e6, for example 0.1: "
                             "below, rounding loses it beside the sum of u uᵀ, above, that sum beside it")
    smallest = float(min(values)) if values else None
    if isinstance(penalty, Tensor):
        return penalty.to(q.device, torch.float64).expand(heads), smallest
    return torch.full((heads,), penalty, dtype=torch.float64, device=q.device), smallest


def _check_refresh(refresh, write_rule: str) -> tuple[int, float]:
    if write_rule not in ("unit", "gain"):
        raise ValueError(f"refresh adds to A and means nothing for write_rule {write_rule!r}; leave it out")
    try:
        every, amount = refresh
    except (TypeError, ValueError):
        raise ValueError(f"refresh is {refresh!r}; give a pair (every, amount), for example (20, 1e-3)") from None
    if (not isinstance(every, int) or isinstance(every, bool) or every < 1 or not isinstance(amount, (int, float))
            or not 0 <= amount < math.inf):
        raise ValueError(f"refresh is {refresh!r}; `every` must be a positive whole number of tokens and `amount` >= 0")
    return every, float(amount)


def _check_state(state, call: Call) -> None:
    if not isinstance(state, State):
        raise TypeError(f"initial_state is a {type(state).__name__}; give a kernels.State")
    n, heads, dk, dv = call.sequences, call.q.shape[2], call.q.shape[3], call.v.shape[3]
    expected = {"S": (n, heads, dv, dk), "A": (n, heads, dk, dk) if call.write_rule in PENALTY_RULES else None,
                "z": (n, heads, dk) if call.readout == "normalized" else None}
    for name, shape in expected.items():
        x = getattr(state, name)
        if (x is None) != (shape is None):
            raise ValueError(f"initial_state.{name} is {'missing' if x is None else 'given'}, but write_rule "
                             f"{call.write_rule!r} with readout {call.readout!r} {'needs' if x is None else 'has no'} "
                             f"{name}; make the state with State.initial or take it from a call with the same options")
        if x is None:
            continue
        if tuple(x.shape) != shape:
            raise ValueError(f"initial_state.{name} has shape {list(x.shape)}; expected {list(shape)} "
                             "(N = batch rows, or documents when packed)")
        if x.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"initial_state.{name} has dtype {x.dtype}; states are float32 or float64")
        if x.device != call.q.device:
            raise ValueError(f"initial_state.{name} is on {x.device} and q on {call.q.device}; move both to one device")
    rest = state.A_rest
    if rest is not None and (state.A is None or rest.shape != state.A.shape or rest.device != state.A.device):
        there = "no A" if state.A is None else f"A {list(state.A.shape)} on {state.A.device}"
        raise ValueError(f"initial_state.A_rest has shape {list(rest.shape)} on {rest.device}, and there is {there}; "
                         "hand on the state as vla gave it")
