"""The chunk-parallel backend in PyTorch: exact, for CPU and CUDA, forward and backward."""

import torch
from torch import Tensor

from kernels.delta_rule import delta_rule_on_grid
from kernels.features import DENOMINATOR_EPS, features, head_norm, unit
from kernels.grid import Grid, make_grid
from kernels.key_sum import key_sum
from kernels.state import PENALTY_RULES, Diagnostics, Output, State, jacobian_norm
from kernels.write_direction import checked_inverse, extreme_eigenvalues, spd_inverse, write_direction


def chunked(call) -> Output:
    """Run a validated `arguments.Call` in chunks."""
    grid = make_grid(*call.q.shape[:3], call.chunk_size, call.bounds, call.q.device)
    dtype, rule, state = call.work_dtype, call.write_rule, call.initial_state
    q, k, v, u, beta, g = (None if x is None else grid.pack(x)
                           for x in (call.q, call.k, call.v, call.u, call.beta, call.g))
    v = v.to(dtype)
    beta, g = (None if x is None or (rule == "linear" and x is beta) else x.to(dtype) for x in (beta, g))
    fq = features(q.to(dtype), call.feature_map)
    # Keys, directions and A in float64: see write_direction.
    wide_key = _key_features(k, torch.float64 if rule in PENALTY_RULES else dtype, call, grid)
    fk = wide_key.to(dtype)
    S0 = None if state is None else grid.sort(state.S.to(dtype))
    M_last = None

    if rule in PENALTY_RULES:
        wide_unit = unit(wide_key)
        direction = wide_unit if u is None else unit(u.double())
        if call.u_scale == "inverse_sqrt_d":
            direction = direction / direction.shape[-1] ** 0.5
        x = wide_key if call.erase_key == "raw" else wide_unit
        M0 = _initial_penalty(call, grid)
        if rule == "mesa":
            return _mesa(call, grid, fq, fk, v, x, M0)
        a, M_last = write_direction(None if x is direction else x, direction, M0, grid)
        erase, write = x.to(dtype), (unit(a) if rule == "unit" else a).to(dtype)
    elif rule == "fixed":
        direction, M0 = None, None
        erase = write = fk if call.erase_key == "raw" else unit(fk)
    else:
        direction, M0, erase, write = None, None, None, fk
    o, S_last, residual, starts = delta_rule_on_grid(fq, erase, write, v, beta, g, S0, grid)
    diagnostics = None
    if call.diagnostics:
        diagnostics = _diagnostics(grid, erase, write, beta, g, residual, starts, S_last, direction, M0)
    return _finish(call, grid, o, fq, fk, S_last, M_last, diagnostics)


def _key_features(k: Tensor, dtype: torch.dtype, call, grid: Grid) -> Tensor:
    """φ(k) on the grid, zero in the padding, where φ itself may not be."""
    k = features(k.to(dtype), call.feature_map)
    if grid.padding is None:
        return k
    padding = grid.padding[:, None].expand(-1, grid.heads, -1).reshape(*k.shape[:2], 1)
    return k.masked_fill(padding, 0)


def _initial_penalty(call, grid: Grid) -> Tensor:
    """M_0 per sequence and head, [N * H, Dk, Dk] float64: λ0 I, or the inverse of the A handed in."""
    if call.initial_state is not None:
        state = call.initial_state
        return checked_inverse(grid.sort(state.full_penalty_inverse()), state.A_rest is not None)
    dk = call.q.shape[-1]
    diagonal = call.penalty[None, :, None].expand(grid.sequences, grid.heads, dk)
    return torch.diag_embed(diagonal).flatten(0, 1)


def _mesa(call, grid: Grid, fq: Tensor, fk: Tensor, v: Tensor, unit_key: Tensor, M0: Tensor) -> Output:
    """o = G_t A_t φ(q) with G_t = Σ v k̂ᵀ: the map of the write direction applied to q, then linear attention.

    In float64 throughout: G grows like T where G A stays bounded, so float32 would lose the difference.
    The state is S = G A, the memory of the write rule `gain`.
    """
    state, dtype = call.initial_state, call.work_dtype
    G0 = None if state is None else grid.sort(state.S.double()) @ M0
    reading, M_last = write_direction(fq.double(), unit_key, M0, grid)
    o, G_last, _, _ = delta_rule_on_grid(reading, None, unit_key, v.double(), None, None, G0, grid)
    S_last = G_last @ spd_inverse(M_last)
    diagnostics = None
    if call.diagnostics:
        with torch.no_grad():  # residuals are those of the recursive form
            a, _ = write_direction(None, unit_key, M0, grid)
            S0 = None if state is None else grid.sort(state.S.double())
            _, S, residual, starts = delta_rule_on_grid(reading, unit_key, a, v.double(), None, None, S0, grid)
            diagnostics = _diagnostics(grid, unit_key, a, None, None, residual, starts, S, unit_key, M0)
    return _finish(call, grid, o.to(dtype), fq, fk, S_last.to(dtype), M_last, diagnostics)


def _finish(call, grid: Grid, o: Tensor, fq: Tensor, fk: Tensor, S_last: Tensor, M_last: Tensor | None,
            diagnostics: Diagnostics | None) -> Output:
    """Read-out, and the states back in the caller's order."""
    state, dtype, z_last = call.initial_state, call.work_dtype, None
    if call.readout == "normalized":
        z0 = None if state is None else grid.sort(state.z.to(dtype))
        denominator, z_last = key_sum(fq, fk, z0, grid)
        o = o / denominator.clamp(min=DENOMINATOR_EPS)[..., None]
    else:
        o = head_norm(o)
    final = None
    if call.output_final_state:
        final = State(grid.unsort(S_last), None, None if z_last is None else grid.unsort(z_last))
        if M_last is not None:
            final = final.with_penalty_inverse(grid.unsort(spd_inverse(M_last)), dtype)
    return Output(grid.unpack(o.to(call.v.dtype)), final, diagnostics)


@torch.no_grad()
def _diagnostics(grid: Grid, erase: Tensor | None, write: Tensor, beta: Tensor | None, g: Tensor | None,
                 residual: Tensor, starts: Tensor, S_last: Tensor, direction: Tensor | None,
                 M0: Tensor | None) -> Diagnostics:
    erase = torch.zeros_like(write) if erase is None else erase
    norms = torch.linalg.matrix_norm(starts)
    state_norm = grid.ends_from_starts(norms, torch.linalg.matrix_norm(S_last))
    penalty_norm = condition = None
    if direction is not None:
        gram = direction.mT @ direction
        before, _ = grid.sum_before(gram, M0)
        M = before + gram
        least, largest = extreme_eigenvalues(M)
        penalty_norm = grid.by_row(torch.linalg.matrix_norm(spd_inverse(M)).to(norms.dtype))
        condition = grid.by_row((largest / least).to(norms.dtype))
    per_token = ((erase * write).sum(-1), jacobian_norm(erase, write, beta, g),
                 torch.linalg.vector_norm(residual, dim=-1))
    return Diagnostics(grid.ends, grid.by_row(state_norm), penalty_norm, condition, *map(grid.unpack, per_token))
