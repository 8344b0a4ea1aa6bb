"""Diagnostics: equal in both backends, and equal to their definitions."""

from dataclasses import fields

import pytest
import torch
from kernel_cases import VARIANTS, assert_close, make_inputs

from kernels import Diagnostics, State, vla
from kernels.write_direction import extreme_eigenvalues, largest_eigenvalue, spd_inverse

TENSORS = ("q", "k", "v", "u", "penalty", "beta", "g")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_in_both_backends(variant, packed):
    tokens, chunk = 37, 8
    more = dict(cu_seqlens=torch.tensor([0, 3, 20, 37])) if packed else {}
    leaves, options = make_inputs(variant, "headwise", 1 if packed else 2, tokens, 2, 6, 4,
                                  sequences=3 if packed else None, with_state=True)
    state = State(leaves["S"], leaves["A"], leaves["z"])
    found = []
    for backend in ("reference", "chunked"):
        d = vla(**{n: leaves[n] for n in TENSORS}, initial_state=state, diagnostics=True, chunk_size=chunk,
                backend=backend, **options, **more).diagnostics
        found.append({f.name: getattr(d, f.name) for f in fields(Diagnostics) if getattr(d, f.name) is not None})
    assert_close(found[1], found[0], 1e-11)
    ends = found[1]["chunk_ends"].tolist()
    assert ends == ([2, 10, 18, 19, 27, 35, 36] if packed else [7, 15, 23, 31, 36])
    assert found[1]["state_norm"].shape == (1 if packed else 2, len(ends), 2)
    assert ("penalty_norm" in found[1]) == (options["write_rule"] in ("unit", "gain", "mesa"))


def test_equal_to_their_definitions():
    leaves, options = make_inputs("unit", "headwise", 1, 12, 1, 5, 3)
    out = vla(**{n: leaves[n] for n in TENSORS}, diagnostics=True, output_final_state=True, chunk_size=4, **options)
    d, final = out.diagnostics, out.final_state
    torch.testing.assert_close(d.state_norm[0, -1, 0], torch.linalg.matrix_norm(final.S[0, 0]))
    torch.testing.assert_close(d.penalty_norm[0, -1, 0], torch.linalg.matrix_norm(final.A[0, 0]))
    torch.testing.assert_close(d.penalty_condition[0, -1, 0], torch.linalg.cond(final.A[0, 0]))
    # The Jacobian of the last step, by differentiating it: from the state before token 11.
    before = vla(**{n: leaves[n] if n == "penalty" else leaves[n][:, :11] for n in TENSORS}, output_final_state=True,
                 **options).final_state

    def last(S):
        x = {n: leaves[n] if n == "penalty" else leaves[n][:, 11:] for n in TENSORS}
        return vla(**x, initial_state=State(S, before.A), output_final_state=True, backend="reference",
                   **options).final_state.S

    jacobian = torch.autograd.functional.jacobian(last, before.S).reshape(15, 15)
    torch.testing.assert_close(d.jacobian_norm[0, 11, 0], torch.linalg.matrix_norm(jacobian, 2))


@pytest.mark.parametrize("size", [1, 3, 64, 256])
def test_the_largest_eigenvalue_by_squaring(size):
    """What CUDA takes in place of `eigvalsh`: of A after many tokens of few directions, its inverse, one λ alone."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(5, 1 + size // 4, size, generator=generator, dtype=torch.float64)
    M = 0.1 * torch.eye(size, dtype=torch.float64) + 1e5 * u.mT @ u
    for x in (M, spd_inverse(M), torch.eye(size, dtype=torch.float64).expand(2, -1, -1), 1e-100 * M):
        torch.testing.assert_close(largest_eigenvalue(x), torch.linalg.eigvalsh(x)[..., -1], rtol=3e-6, atol=0)


def test_a_matrix_that_rounding_left_without_an_inverse_has_an_infinite_condition():
    least, largest = extreme_eigenvalues(torch.diag(torch.tensor([1.0, 0.5, -1e-9], dtype=torch.float64)))
    assert least == 0 and largest / least == torch.inf


def test_diagnostics_carry_no_gradient():
    leaves, options = make_inputs("unit", "normalized", 1, 10, 1, 4, 4, gates=False)
    k = leaves["k"].requires_grad_()
    for backend in ("reference", "chunked"):
        d = vla(leaves["q"], k, leaves["v"], diagnostics=True, backend=backend, **options).diagnostics
        assert not any(getattr(d, f.name).requires_grad for f in fields(Diagnostics))
