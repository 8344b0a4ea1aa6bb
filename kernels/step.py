"""One token of decoding. A is kept in float64 from step to step, everything else in at least float32."""

from torch import Tensor

from kernels.features import DENOMINATOR_EPS, features, head_norm, unit
from kernels.state import PENALTY_RULES, Output, State


def step(call) -> Output:
    """Run a validated `arguments.Call` of one token (T = 1); the final state holds A in float64."""
    dtype, rule = call.work_dtype, call.write_rule
    q, k, v, u = (None if x is None else x[:, 0] for x in (call.q, call.k, call.v, call.u))
    state = call.initial_state
    if state is None:
        state = State.initial(q.shape[0], q.shape[1], q.shape[-1], v.shape[-1], call.penalty, rule, call.readout,
                              call.penalty.dtype, q.device)
    S, z, A = state.S.to(dtype), None if state.z is None else state.z.to(dtype), None
    fq, fk = features(q.to(dtype), call.feature_map), features(k.to(dtype), call.feature_map)

    if rule in PENALTY_RULES:
        wide_key = features(k.double(), call.feature_map)
        wide_unit = unit(wide_key)
        direction = wide_unit if u is None else unit(u.double())
        if call.u_scale == "inverse_sqrt_d":
            direction = direction / direction.shape[-1] ** 0.5
        x = wide_key if call.erase_key == "raw" else wide_unit
        A = _sherman_morrison(state.full_penalty_inverse(), direction)
        a = _times(A, x)
        erase_key, write_key = x.to(dtype), (unit(a) if rule == "unit" else a).to(dtype)
    elif rule == "fixed":
        erase_key = write_key = fk if call.erase_key == "raw" else unit(fk)
    else:
        erase_key, write_key = None, fk

    if call.g is not None:
        S = S * call.g[:, 0].to(dtype).exp()[..., None, None]
    residual = v.to(dtype)
    if erase_key is not None:
        residual = residual - _times(S, erase_key)
        if call.beta is not None:
            residual = residual * call.beta[:, 0].to(dtype)[..., None]
    S = S + residual[..., None] * write_key[..., None, :]

    o = _times(S, fq)
    if call.readout == "normalized":
        z = z + fk
        o = o / (fq * z).sum(-1, keepdim=True).clamp(min=DENOMINATOR_EPS)
    else:
        o = head_norm(o)
    return Output(o[:, None].to(call.v.dtype), State(S, A, z))


def _sherman_morrison(A: Tensor, u: Tensor) -> Tensor:
    """(A⁻¹ + u uᵀ)⁻¹, the paper's eq. (9)."""
    projected = _times(A, u)
    delta = 1 + (u * projected).sum(-1)
    return A - projected[..., None] * (projected / delta[..., None])[..., None, :]


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None]).squeeze(-1)
