"""The token loop: slow, plain, differentiable by autograd. In float64 it is the ground truth of the tests.

Deliberately shares no arithmetic with the chunked path: Sherman–Morrison instead of Woodbury, autograd instead of
hand-derived gradients. It computes in the dtype of its input (half precisions in float32).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.features import DENOMINATOR_EPS, HEAD_NORM_EPS
from kernels.state import PENALTY_RULES, Diagnostics, Output, State, jacobian_norm


def reference(call) -> Output:
    """Run a validated `arguments.Call` token by token; packed documents one after the other."""
    bounds = call.bounds
    if bounds is None:
        o, state, diagnostics = _sequence(call, slice(None), slice(None))
    else:
        pieces = [_sequence(call, slice(n, n + 1), slice(a, b)) for n, (a, b) in enumerate(zip(bounds, bounds[1:]))]
        o = torch.cat([piece[0] for piece in pieces], 1)
        state = State(*(_join([getattr(piece[1], name) for piece in pieces]) for name in ("S", "A", "z")))
        diagnostics = _join_diagnostics([piece[2] for piece in pieces], bounds) if call.diagnostics else None
    return Output(o.to(call.v.dtype), state if call.output_final_state else None, diagnostics)


def _sequence(call, rows: slice, tokens: slice):
    """One dense stretch: `rows` selects the initial states, `tokens` the time steps."""
    dtype = call.work_dtype
    def take(x):
        return None if x is None else x[:, tokens].to(dtype)

    q, k, v, u, beta, g = (take(x) for x in (call.q, call.k, call.v, call.u, call.beta, call.g))
    penalised, rule = call.write_rule in PENALTY_RULES, call.write_rule
    fq, fk = _features(q, call.feature_map), _features(k, call.feature_map)
    unit_key = _unit(fk)
    x = fk if call.erase_key == "raw" or rule == "linear" else unit_key
    direction = unit_key if u is None else _unit(u)
    if call.u_scale == "inverse_sqrt_d":
        direction = direction / direction.shape[-1] ** 0.5

    S, A, z = _initial(call, rows, q.shape[0], q.shape[-1], v.shape[-1], dtype)
    G = S @ torch.linalg.inv(A) if rule == "mesa" else None  # Σ v k̂ᵀ, from S = G A
    outputs, per_token, per_chunk = [], [], []
    for t in range(q.shape[1]):
        if penalised:
            old_A = A
            projected = A @ direction[:, t, :, :, None]
            delta = 1 + direction[:, t, :, None, :] @ projected
            A = A - projected @ projected.mT / delta
        xt = x[:, t]
        a = (A @ xt[..., None]).squeeze(-1) if penalised else xt
        write_key = _unit(a) if rule == "unit" else a
        decayed = S if g is None else S * g[:, t].exp()[..., None, None]
        if rule == "linear":
            erase_key, residual = torch.zeros_like(xt), v[:, t]
        else:
            erase_key = xt
            memory = decayed if rule != "mesa" else G @ old_A
            residual = v[:, t] - (memory @ xt[..., None]).squeeze(-1)
        strength = None if beta is None or rule == "linear" else beta[:, t]
        if rule == "mesa":
            G = G + v[:, t, :, :, None] * xt[..., None, :]
            S = G @ A
        else:
            written = residual if strength is None else residual * strength[..., None]
            S = decayed + written[..., None] * write_key[..., None, :]
        o = (S @ fq[:, t, :, :, None]).squeeze(-1)
        if z is not None:
            z = z + fk[:, t]
            o = o / (fq[:, t] * z).sum(-1, keepdim=True).clamp(min=DENOMINATOR_EPS)
        else:
            o = F.rms_norm(o, o.shape[-1:], eps=HEAD_NORM_EPS)
        outputs.append(o)
        if penalised and call.refresh is not None and (t + 1) % call.refresh[0] == 0:
            A = A + call.refresh[1] * torch.eye(A.shape[-1], dtype=dtype, device=A.device)
        if call.diagnostics:
            with torch.no_grad():
                decay = None if g is None else g[:, t]
                per_token.append(((erase_key * write_key).sum(-1),
                                  jacobian_norm(erase_key, write_key, strength, decay),
                                  torch.linalg.vector_norm(residual, dim=-1)))
                if (t + 1) % call.chunk_size == 0 or t + 1 == q.shape[1]:
                    per_chunk.append((t, _norm(S), _norm(A), torch.linalg.cond(A) if penalised else None))
    diagnostics = _diagnostics(per_token, per_chunk, q.device) if call.diagnostics else None
    return torch.stack(outputs, 1), State(S, A, z), diagnostics


def _initial(call, rows: slice, n: int, dk: int, dv: int, dtype: torch.dtype):
    heads = call.q.shape[2]
    S = A = z = None
    given = call.initial_state
    if given is not None:
        S = given.S[rows].to(dtype)
        z = None if given.z is None else given.z[rows].to(dtype)
        A = None if given.A is None else given.full_penalty_inverse()[rows].to(dtype)
        return S, A, z
    S = call.q.new_zeros(n, heads, dv, dk, dtype=dtype)
    if call.readout == "normalized":
        z = call.q.new_zeros(n, heads, dk, dtype=dtype)
    if call.write_rule in PENALTY_RULES:
        eye = torch.eye(dk, dtype=dtype, device=S.device)
        A = (eye / call.penalty.to(dtype)[:, None, None]).expand(n, heads, dk, dk)
    return S, A, z


def _features(x: Tensor, feature_map: str) -> Tensor:
    if feature_map == "elu1":
        return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))
    return F.silu(x) if feature_map == "silu" else x


def _unit(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)  # a zero vector: zero, gradient zero


def _norm(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.linalg.matrix_norm(x)


def _join(parts: list) -> Tensor | None:
    return None if parts[0] is None else torch.cat(parts, 0)


def _diagnostics(per_token: list, per_chunk: list, device) -> Diagnostics:
    tokens = [torch.stack(x, 1) for x in zip(*per_token)]
    ends, *chunks = zip(*per_chunk)
    chunks = [None if x[0] is None else torch.stack(x, 1) for x in chunks]
    return Diagnostics(torch.tensor(ends, device=device), *chunks, *tokens)


def _join_diagnostics(parts: list[Diagnostics], bounds: list[int]) -> Diagnostics:
    ends = torch.cat([part.chunk_ends + start for part, start in zip(parts, bounds)])
    names = ("state_norm", "penalty_norm", "penalty_condition", "write_alignment", "jacobian_norm", "residual_norm")
    columns = [[getattr(part, name) for part in parts] for name in names]
    return Diagnostics(ends, *(None if x[0] is None else torch.cat(x, 1) for x in columns))
