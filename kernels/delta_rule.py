"""The generalised delta rule in chunks, with its gradient by hand. Equations in the README of this folder.

S_t = e^{g_t} S_{t-1} + β_t e_t w_tᵀ with e_t = v_t - e^{g_t} S_{t-1} κ_t, read out as o_t = S_t q_t. It knows nothing
of where the erase key κ and the write key w come from: DeltaNet, the delta rule with a fixed A, every VLA write rule
and, with κ left out, (decaying) linear attention are this one function.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.arguments import check_chunk_size, check_cu_seqlens, check_tensors
from kernels.grid import Grid, make_grid

LEAST_DECAY = -50.0  # g below it counts as it: e^-50 forgets all, and sums of larger ones would leave float32 no digits


def delta_rule(q: Tensor, erase_key: Tensor | None, write_key: Tensor, v: Tensor, beta: Tensor | None = None,
               g: Tensor | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
               cu_seqlens: Tensor | None = None, chunk_size: int = 64) -> tuple[Tensor, Tensor | None]:
    """The recurrence above over [B, T, H, D] tensors, taken as they are (no feature map, no normalisation).

    Args: q, erase_key (None: nothing is erased), write_key [B, T, H, Dk]; v [B, T, H, Dv]; beta, g [B, T, H] or None
        (1 and 0); initial_state [N, H, Dv, Dk] or None (zeros); cu_seqlens [N + 1] with B = 1, N = B without it.
    Returns: o [B, T, H, Dv] in the dtype of v, and the final state [N, H, Dv, Dk] or None.
    """
    companions = {"write_key": (write_key, "same"), "v": (v, "any width")}
    if erase_key is not None:
        companions["erase_key"] = (erase_key, "same")
    check_tensors(q, companions, {"beta": beta, "g": g})
    check_chunk_size(chunk_size)
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, q)
    grid = make_grid(*q.shape[:3], chunk_size, bounds, q.device)
    expected = [grid.sequences, q.shape[2], v.shape[3], q.shape[3]]
    if initial_state is not None and list(initial_state.shape) != expected:
        raise ValueError(f"initial_state has shape {list(initial_state.shape)}; expected [N, H, Dv, Dk] = {expected}")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        packed = [None if x is None else grid.pack(x).to(dtype) for x in (q, erase_key, write_key, v, beta, g)]
        S0 = None if initial_state is None else grid.sort(initial_state.to(dtype))
        o, S_last, _, _ = delta_rule_on_grid(*packed, S0, grid)
        return grid.unpack(o).to(v.dtype), grid.unsort(S_last) if output_final_state else None


def delta_rule_on_grid(q: Tensor, erase: Tensor | None, write: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None,
                       S0: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same on the grid: [chunks * H, C, D] and [chunks * H, C], zero in the padding; S0 [N * H, Dv, Dk].

    Returns o and the final S [N * H, Dv, Dk]; and, without gradient, the residuals e [chunks * H, C, Dv] and the
    transposed states Sᵀ at chunk starts [chunks * H, Dk, Dv].
    """
    if beta is not None:
        write = write * beta[..., None]  # β enters the recurrence only as β w
    if S0 is None:
        S0 = q.new_zeros(grid.sequences * grid.heads, v.shape[-1], q.shape[-1])
    o, S_last, residual, starts = _DeltaRule.apply(q, erase, write, v, g, S0, grid)
    return o, S_last, v.detach() if residual is None else residual, starts


class _Decay:
    """Factors e^{G_t - G_s} inside a chunk, G = cumsum(g); without g every method returns its argument."""

    def __init__(self, g: Tensor | None):
        self.G = None if g is None else g.clamp(min=LEAST_DECAY).cumsum(-1)

    def since_start(self, x: Tensor) -> Tensor:
        return x if self.G is None else x * self.G.exp()[..., None]

    def until_end(self, x: Tensor) -> Tensor:
        return x if self.G is None else x * (self.G[:, -1:] - self.G).exp()[..., None]

    def between_(self, scores: Tensor, diagonal: int) -> Tensor:
        """tril(D ⊙ scores, diagonal), in place; D_ts = e^{G_t - G_s}."""
        scores.tril_(diagonal)
        if self.G is not None:  # above the diagonal the exponent is positive and could overflow: 0 · inf
            scores *= (self.G[:, :, None] - self.G[:, None, :]).tril_().exp_()
        return scores

    def whole(self) -> Tensor | float:
        """e^{G_C}, the factor over a whole chunk, [chunks * H, 1]; 1 without g."""
        return 1.0 if self.G is None else self.G[:, -1:].exp()


class _DeltaRule(torch.autograd.Function):
    """Names as in the README: H = Sᵀ at chunk starts, P = the write keys (times β), N the strictly lower matrix."""

    @staticmethod
    def forward(ctx, q, erase, P, v, g, S0, grid):
        decay = _Decay(g)
        closing = decay.until_end(P).mT
        H0 = S0.mT
        if erase is None:
            E, step = v, decay.whole()
            H, H_last = _scan(grid, step, closing @ v, H0)
        else:
            N = decay.between_(erase @ P.mT, -1)
            E, E_k = _solve(N, v, decay.since_start(erase))
            step = _step_matrix(decay, closing, E_k)
            H, H_last = _scan(grid, step, closing @ E, H0)
            E = torch.baddbmm(E, E_k, H, alpha=-1)
        o = decay.since_start(q) @ H
        o.baddbmm_(decay.between_(q @ P.mT, 0), E)
        ctx.save_for_backward(q, erase, P, g, E, H)
        ctx.grid = grid
        ctx.set_materialize_grads(False)
        residual = None if erase is None else E
        ctx.mark_non_differentiable(*(x for x in (residual, H) if x is not None))
        return o, H_last.mT.contiguous(), residual, H

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dS_last, _, __):
        saved = ctx.saved_tensors  # once: under activation checkpointing a second look computes them again
        with torch.autocast(saved[0].device.type, enabled=False):  # backward() may be called inside one
            return _DeltaRule._gradients(*saved, ctx.grid, do, dS_last)

    @staticmethod
    def _gradients(q, erase, P, g, E, H, grid, do, dS_last):
        decay = _Decay(g)
        do = E.new_zeros(E.shape) if do is None else do
        dH_last = H.new_zeros(grid.sequences * grid.heads, *H.shape[1:]) if dS_last is None else dS_last.mT
        opening = decay.since_start(q).mT

        dE = decay.between_(q @ P.mT, 0).mT @ do
        closing = decay.until_end(P)
        if erase is None:
            dH_end, dH0 = _scan_back(grid, decay.whole(), opening @ do, dH_last)
            dv = torch.baddbmm(dE, closing, dH_end)
        else:
            N = decay.between_(erase @ P.mT, -1)
            dv, Y_p = _solve(N, dE, closing, transpose=True)
            erasing = decay.since_start(erase).mT
            step = _step_matrix(decay, erasing, Y_p)
            dH_end, dH0 = _scan_back(grid, step, torch.baddbmm(opening @ do, erasing, dv, alpha=-1), dH_last)
            dv = torch.baddbmm(dv, Y_p, dH_end)

        dq = decay.since_start(do @ H.mT)
        scores = decay.between_(do @ E.mT, 0)
        dq.baddbmm_(scores, P)
        carried = decay.until_end(E @ dH_end.mT)
        dP = torch.baddbmm(carried, scores.mT, q)
        derase = dg = None
        if erase is not None:
            scores = decay.between_(dv @ E.mT, -1)
            derase = decay.since_start(dv @ H.mT).baddbmm_(scores, P).neg_()
            dP.baddbmm_(scores.mT, erase, alpha=-1)
        if g is not None:
            dG = (q * dq).sum(-1) - (P * dP).sum(-1)
            if erase is not None:
                dG += (erase * derase).sum(-1)
            whole = (H * dH_end).sum((-2, -1)) * decay.whole()[:, 0]
            dG[:, -1] += whole + (P * carried).sum((-2, -1))
            dg = dG.flip(-1).cumsum(-1).flip(-1)
        return dq, derase, dP, dv, dg, dH0.mT, None


def _solve(N: Tensor, left: Tensor, right: Tensor, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """(I + N)⁻¹ applied to two stacks of columns by substitution (or (I + Nᵀ)⁻¹); never by repeated squaring."""
    columns = torch.cat([left, right], -1)
    solved = torch.linalg.solve_triangular(N.mT if transpose else N, columns, upper=transpose, unitriangular=True)
    return solved[..., : left.shape[-1]], solved[..., left.shape[-1]:]


def _step_matrix(decay: _Decay, left: Tensor, right: Tensor) -> Tensor:
    """e^{G_C} I - left right: what a chunk does to the state before it, [chunks * H, Dk, Dk]."""
    step = (left @ right).neg_()
    step.diagonal(dim1=-2, dim2=-1).add_(decay.whole())
    return step


def _scan(grid: Grid, step: Tensor | float, add: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """H ← step H + add along each sequence, from `first` [N * H, Dk, Dv]: H at chunk starts, and after the last chunk.

    The one loop over chunks: one batched product per step of the grid. `add` is overwritten.
    """
    h, before = grid.heads, first
    for j, active in enumerate(grid.active):
        block = slice(grid.starts[j] * h, grid.starts[j + 1] * h)
        before = _advance_(add[block], step, block, before[: active * h])
    return grid.starts_from_ends(add, first)


def _scan_back(grid: Grid, step: Tensor | float, add: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """dH ← step dH + add against time, from `last` [N * H, Dk, Dv]: dH at chunk ends, and before the first chunk.

    `add` is overwritten.
    """
    h, after = grid.heads, last[:0]
    for j in reversed(range(len(grid.active))):
        block = slice(grid.starts[j] * h, grid.starts[j + 1] * h)
        if len(after) < grid.active[j] * h:  # sequences that end here join in
            after = torch.cat([after, last[len(after): grid.active[j] * h]])
        after = _advance_(add[block], step, block, after)
    return grid.ends_from_starts(add, last), after


def _advance_(add: Tensor, step: Tensor | float, block: slice, state: Tensor) -> Tensor:
    if isinstance(step, float):
        return add.add_(state, alpha=step)
    return add.baddbmm_(step[block], state) if step.dim() == 3 else add.addcmul_(step[block, :, None], state)
