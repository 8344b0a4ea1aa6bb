"""What goes into and comes out of the operator: the memory state, the output and the diagnostics."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PENALTY_RULES = ("unit", "gain", "mesa")
WRITE_RULES = (*PENALTY_RULES, "fixed", "linear")
READOUTS = ("normalized", "headwise")


@dataclass(frozen=True)
class State:
    """All that a head remembers of the past (README of this folder). N = rows of the batch, or documents when packed.

    S: memory, [N, H, Dv, Dk].
    A: inverse penalty matrix, symmetric, [N, H, Dk, Dk]; None for write rules without one (`fixed`, `linear`).
    z: sum of the key features, [N, H, Dk]; None for `readout="headwise"`.
    A_rest: what rounding A to float32 left out, same shape; None where nothing was. On repetitive input A holds 10 and
        1e-6 side by side, so float32 alone would lose the small part; the operator adds the two in float64.
    All float32 (float64 for float64 input). `vla_step` hands out A in float64 instead of a pair.
    """

    S: Tensor
    A: Tensor | None = None
    z: Tensor | None = None
    A_rest: Tensor | None = None

    @classmethod
    def initial(cls, n: int, heads: int, dk: int, dv: int, penalty: float | Tensor = 0.1, write_rule: str = "unit",
                readout: str = "normalized", dtype: torch.dtype = torch.float32,
                device: torch.device | str | None = None) -> "State":
        """The state before the first token: S = 0, A = I/λ0, z = 0. `penalty` is λ0, a number or [H].

        Raises ValueError for an unknown rule or read-out and for a number λ0 that is not positive and finite.
        """
        for name, value, allowed in (("write_rule", write_rule, WRITE_RULES), ("readout", readout, READOUTS)):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}")
        if isinstance(penalty, Tensor):
            if penalty.shape not in ((), (1,), (heads,)):
                raise ValueError(f"penalty has shape {list(penalty.shape)}; expected [{heads}], or give a number")
        elif not (penalty > 0 and math.isfinite(penalty)):
            raise ValueError(f"penalty (λ0) is {penalty}; it must be positive and finite, for example 0.1: A is I/λ0")
        S = torch.zeros(n, heads, dv, dk, dtype=dtype, device=device)
        A = z = None
        if write_rule in PENALTY_RULES:
            if isinstance(penalty, Tensor):
                penalty = penalty.to(device, dtype).expand(heads)
            else:  # filled, not copied there: a copy would wait for all that a GPU has still to do
                penalty = torch.full((heads,), penalty, dtype=dtype, device=device)
            diagonal = 1 / penalty
            A = torch.diag_embed(diagonal[:, None].expand(heads, dk)).expand(n, heads, dk, dk).clone()
        if readout == "normalized":
            z = torch.zeros(n, heads, dk, dtype=dtype, device=device)
        return cls(S, A, z)

    def map(self, function) -> "State":
        """The state with `function` applied to each tensor it holds."""
        return State(*(None if x is None else function(x) for x in (self.S, self.A, self.z, self.A_rest)))

    def detach(self) -> "State":
        """Cut from the autograd graph (truncated backpropagation)."""
        return self.map(Tensor.detach)

    def index_select(self, rows: Tensor) -> "State":
        """The states of some rows (int64 [M]) in that order."""
        return self.map(lambda x: x.index_select(0, rows))

    def to(self, device: torch.device | str) -> "State":
        """On another device; the dtypes stay."""
        return self.map(lambda x: x.to(device))

    def full_penalty_inverse(self) -> Tensor:
        """A with its rest, float64 and exactly symmetric, [N, H, Dk, Dk]."""
        A = self.A.double() if self.A_rest is None else self.A.double() + self.A_rest.double()
        return (A + A.mT) / 2

    def with_penalty_inverse(self, A: Tensor, dtype: torch.dtype) -> "State":
        """Holding the float64 matrix A rounded to `dtype`, and what the rounding left out."""
        rounded = A.to(dtype)
        rest = None if dtype == A.dtype else (A - rounded.to(A.dtype)).detach().to(dtype)
        return replace(self, A=rounded, A_rest=rest)


@dataclass(frozen=True)
class Diagnostics:
    """Measurements without gradient. NC = chunks of a row; when packed B = 1 and NC = chunks of all documents in order.

    chunk_ends: token index (inclusive, into T) of each chunk's end, int64 [NC].
    state_norm: ‖S‖_F at chunk ends, [B, NC, H].
    penalty_norm, penalty_condition: ‖A‖_F and cond_2(A) at chunk ends, [B, NC, H]; None for rules without A. The second
        is inf where A, as it is rounded, is not positive definite.
    write_alignment: c = κ·w per token, [B, T, H] (0 for `linear`, which erases nothing).
    jacobian_norm: ‖∂S_t/∂S_{t-1}‖₂ per token, [B, T, H], by `jacobian_norm` below.
    residual_norm: ‖e_t‖ per token, [B, T, H].
    """

    chunk_ends: Tensor
    state_norm: Tensor
    penalty_norm: Tensor | None
    penalty_condition: Tensor | None
    write_alignment: Tensor
    jacobian_norm: Tensor
    residual_norm: Tensor


@dataclass(frozen=True)
class Output:
    """o: [B, T, H, Dv] in the dtype of v. final_state and diagnostics: None unless asked for."""

    o: Tensor
    final_state: State | None = None
    diagnostics: Diagnostics | None = None


def jacobian_norm(erase_key: Tensor, write_key: Tensor, beta: Tensor | None, g: Tensor | None) -> Tensor:
    """‖e^g (I − β w κᵀ)‖₂ = e^g (p + √(p² + 4(1 − m)))/2 with p = β‖w‖‖κ‖, m = β w·κ, keys [..., D].

    In one dimension there is no plane to turn in: it is e^g |1 − m|.
    """
    m = (erase_key * write_key).sum(-1)
    p = torch.linalg.vector_norm(erase_key, dim=-1) * torch.linalg.vector_norm(write_key, dim=-1)
    if beta is not None:
        m, p = m * beta, p * beta.abs()
    if erase_key.shape[-1] == 1:
        norm = (1 - m).abs()
    else:
        norm = (p + (p * p + 4 * (1 - m)).clamp(min=0).sqrt()) / 2
    return norm if g is None else norm * g.exp()
