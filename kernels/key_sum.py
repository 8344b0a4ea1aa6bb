"""The denominator of the paper's read-out: φ(q_t)·z_t with z_t = z_0 + Σ_{s<=t} φ(k_s), on the chunk grid."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.grid import Grid


def key_sum(q: Tensor, k: Tensor, z0: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor]:
    """q_t·z_t [chunks * H, C] and the last z [N * H, D], for features q, k [chunks * H, C, D] and z0 [N * H, D].

    The sums over chunks are float64: z grows like T.
    """
    if z0 is None:
        z0 = q.new_zeros(grid.sequences * grid.heads, q.shape[-1])
    return _KeySum.apply(q, k, z0, grid)


class _KeySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, z0, grid):
        start, last = grid.sum_before(k.sum(1, dtype=torch.float64), z0.double())
        z = k.cumsum(1).add_(start[:, None].to(k.dtype))
        ctx.save_for_backward(q, z)
        ctx.grid = grid
        ctx.set_materialize_grads(False)
        return (q * z).sum(-1), last.to(z0.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, ds, dz_last):
        q, z = ctx.saved_tensors
        grid = ctx.grid
        ds = q.new_zeros(q.shape[:2]) if ds is None else ds
        dz = q * ds[..., None]
        after, total = grid.sum_after(dz.sum(1, dtype=torch.float64))
        if dz_last is not None:
            total = total + dz_last
            grid.add_states_(after, dz_last.double())
        # Σ over this token and those after it in the chunk, then the later chunks.
        dk = dz.flip(1).cumsum(1).flip(1).add_(after[:, None].to(q.dtype))
        return z * ds[..., None], dk, total.to(q.dtype), None
