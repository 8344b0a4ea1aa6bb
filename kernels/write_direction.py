"""a_t = A_t x_t with A_t = (M_0 + Σ_{s<=t} u_s u_sᵀ)⁻¹ for all tokens at once, and its gradient by hand.

Everything here is float64, whatever the dtype of the model. M adds up T rank-one terms to λ0 = 0.1; on repetitive
input (u of low rank) float32 loses λ0, and A holds 1/λ0 beside r/T. In float64 a/‖a‖ is right to 1e-5 even after a
million tokens of one direction, so no tricks are needed: plain prefix sums, one Cholesky inverse per chunk, Woodbury
inside the chunk.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.grid import Grid


def write_direction(x: Tensor | None, u: Tensor, M0: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """a = A_t x_t [chunks * H, C, D] and the last M [N * H, D, D], for x and u on the grid and M0 [N * H, D, D].

    x=None is x = u, with half the work. All float64; x and u are zero in the padding. M0 must be symmetric;
    its gradient is symmetric.
    """
    return _WriteDirection.apply(x, u, M0, grid)


def spd_inverse(M: Tensor) -> Tensor:
    """Inverse of symmetric positive definite matrices [..., D, D], exactly symmetric, with a symmetric gradient."""
    return _SpdInverse.apply(M)


def extreme_eigenvalues(M: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest eigenvalue of symmetric positive definite matrices [..., D, D], float64, without gradient.

    The least is 0 where M, as it was rounded, is not positive definite.
    """
    if not M.is_cuda:
        eigenvalues = torch.linalg.eigvalsh(M)
        return eigenvalues[..., 0].clamp(min=0), eigenvalues[..., -1]
    # cuSOLVER's eigenvalues come one matrix after another.
    factor, info = torch.linalg.cholesky_ex(M)
    least = 1 / largest_eigenvalue(_factored_inverse(factor))
    return least.masked_fill(info != 0, 0), largest_eigenvalue(M)


def largest_eigenvalue(M: Tensor) -> Tensor:
    """λ of symmetric positive semidefinite matrices [..., D, D], float64, by squaring: λⁿ <= ‖Mⁿ‖_F <= √D λⁿ, and with
    n = 2²⁰ the root of √D is within 3e-6 of 1 up to D = 256."""
    log = 0
    for squarings in range(21):
        norm = torch.linalg.matrix_norm(M, keepdim=True)
        log = log + norm[..., 0, 0].log() / 2**squarings
        M = M / norm
        M = M @ M
    return log.exp()


def checked_inverse(A: Tensor, handed_on: bool) -> Tensor:
    """`spd_inverse` of matrices that come from outside, which may not be positive definite: ValueError then.

    handed_on: they are as the operator gave them. Then it does not look on a GPU: the host would wait for it.
    """
    if not (handed_on and A.is_cuda):
        factor, info = torch.linalg.cholesky_ex(A.detach())
        if bool((info != 0).any()) or not bool(torch.isfinite(factor).all()):
            raise ValueError("initial_state.A is not positive definite (or not finite); hand on the state as vla or "
                             "vla_step gave it (with A_rest, which float32 alone loses), or begin with State.initial")
    return spd_inverse(A)


def _inverse(M: Tensor) -> Tensor:
    # cholesky_ex: no synchronisation on a GPU; M >= λ0 I by construction.
    return _factored_inverse(torch.linalg.cholesky_ex(M)[0])


def _factored_inverse(L: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹, exactly symmetric."""
    if L.is_cuda:  # where cholesky_inverse waits for the GPU
        L = torch.linalg.solve_triangular(L, torch.eye(L.shape[-1], dtype=L.dtype, device=L.device), upper=False)
        inverse = L.mT @ L
    else:
        inverse = torch.cholesky_inverse(L)
    return inverse.add_(inverse.mT.clone()).mul_(0.5)


class _SpdInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, M):
        A = _inverse(M)
        ctx.save_for_backward(A)
        return A

    @staticmethod
    @once_differentiable
    def backward(ctx, dA):
        (A,) = ctx.saved_tensors
        return -A @ ((dA + dA.mT) / 2) @ A


class _WriteDirection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, M0, grid):
        M_start, M_last = grid.sum_before(u.mT @ u, M0)
        A = _inverse(M_start)
        W = u @ A
        gram = W @ u.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(1)
        L = torch.linalg.cholesky_ex(gram)[0]
        W = torch.linalg.solve_triangular(L, W, upper=False)
        # Row t of W is z_t/√δ_t of the paper's eq. (9), L_tt is √δ_t, and A_t u_t = z_t/δ_t.
        a = W / L.diagonal(dim1=-2, dim2=-1)[..., None] if x is None else _apply(x, A, W)
        ctx.save_for_backward(u, A, W, a)
        ctx.grid, ctx.x_is_u = grid, x is None
        ctx.set_materialize_grads(False)
        return a, M_last

    @staticmethod
    @once_differentiable
    def backward(ctx, da, dM_last):
        u, A, W, a = ctx.saved_tensors
        grid = ctx.grid
        # du_s = -N_s u_s with N_s = Σ_{t>=s} (b aᵀ + a bᵀ): masked products in the chunk, sums from later chunks.
        b = _apply(torch.zeros_like(a) if da is None else da, A, W)
        outer = b.mT @ a
        later, total = grid.sum_after(outer + outer.mT)
        dM0 = total / -2
        if dM_last is not None:
            dM_last = (dM_last + dM_last.mT) / 2
            dM0 += dM_last
            grid.add_states_(later, dM_last, alpha=-2)
        du = u @ later
        du.baddbmm_((u @ a.mT).triu_(), b)
        du.baddbmm_((u @ b.mT).triu_(), a)
        if ctx.x_is_u:
            return None, torch.sub(b, du), dM0, None
        return b, du.neg_(), dM0, None


def _apply(x: Tensor, A: Tensor, W: Tensor) -> Tensor:
    """X A - tril(X Wᵀ) W: row t is A_t x_t."""
    return torch.baddbmm(x @ A, (x @ W.mT).tril_(), W, alpha=-1)
