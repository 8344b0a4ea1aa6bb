"""What the paper states, and what is true: the corrected propositions, the wrong ones seen to fail."""

import math

import pytest
import torch

from kernels import State, vla
from kernels.features import features, unit

F64 = torch.float64


def _normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _inputs(tokens, d):
    """q, k, v, u as the layer makes them from random keys: u = W_u k, [1, T, 1, d]."""
    q, k, v = (_normal(1, tokens, 1, d, seed=s) for s in range(3))
    return q, k, v, k @ _normal(d, d, seed=3)


def _directions(tokens, d, penalty=0.1, same=False):
    """Unit keys k̂ of elu+1 features, unit write directions α̂ and the matrices M_t, [T, d] and [T, d, d]."""
    _, k, _, u = (x[0, :, 0] for x in _inputs(tokens, d))
    k = unit(features(k, "elu1"))
    u = k if same else unit(u)
    M = penalty * torch.eye(d, dtype=F64) + (u[:, :, None] * u[:, None, :]).cumsum(0)
    return k, unit(torch.linalg.solve(M, k)), M


def _jacobian(k, w, beta=1.0, g=0.0):
    return math.exp(g) * (torch.eye(len(k), dtype=F64) - beta * torch.outer(w, k))


# Proposition 2

def test_jacobian_norm_is_not_one():
    """Paper: ‖I - α̂ k̂ᵀ‖₂ = 1. True: (1 + √(5 - 4c))/2 with c = k̂·α̂, which is 1 only for α̂ = k̂."""
    for same in (False, True):  # u = W_u k, and u = k̂
        k, w, _ = _directions(1_000, 32, same=same)
        norms = torch.linalg.matrix_norm(torch.eye(32, dtype=F64) - w[:, :, None] * k[:, None, :], 2)
        c = (k * w).sum(-1)
        torch.testing.assert_close(norms, (1 + (5 - 4 * c).sqrt()) / 2)
        assert norms.max() > 1.4 and 1.25 < norms.mean() < 1.45
    torch.testing.assert_close(torch.linalg.matrix_norm(_jacobian(k[0], k[0]), 2), torch.tensor(1.0, dtype=F64))


def test_jacobian_norm_by_hand():
    """In the plane, α̂ at 60 degrees from k̂: c = 1/2, so the norm is (1 + √3)/2 = 1.366."""
    k, w = torch.tensor([1.0, 0.0], dtype=F64), torch.tensor([0.5, 3**0.5 / 2], dtype=F64)
    assert torch.linalg.matrix_norm(_jacobian(k, w), 2).item() == pytest.approx((1 + 3**0.5) / 2, abs=1e-14)


@pytest.mark.parametrize("write_rule", ["unit", "gain", "fixed"])
def test_general_jacobian_norm_with_strength_and_decay(write_rule):
    """‖J‖₂ = e^g (p + √(p² + 4(1 - m)))/2, p = β‖w‖‖κ‖, m = β w·κ: the operator's diagnostics against an SVD."""
    d, T = 8, 50
    q, k, v, u = (_normal(1, T, 1, d, seed=s) for s in range(4))
    beta, g = 2 * torch.rand(1, T, 1, dtype=F64), -torch.rand(1, T, 1, dtype=F64)
    norms = vla(q, k, v, u, beta=beta, g=g, write_rule=write_rule, readout="headwise",
                diagnostics=True).diagnostics.jacobian_norm[0, :, 0]
    keys = unit(features(k[0, :, 0], "elu1"))
    directions = unit(u[0, :, 0])
    M = 0.1 * torch.eye(d, dtype=F64) + (directions[:, :, None] * directions[:, None, :]).cumsum(0)
    a = torch.linalg.solve(M, keys)
    writes = {"unit": unit(a), "gain": a, "fixed": keys}[write_rule]
    for t in range(T):
        J = _jacobian(keys[t], writes[t], beta[0, t, 0], g[0, t, 0])
        torch.testing.assert_close(norms[t], torch.linalg.matrix_norm(J, 2))


def test_gradients_are_stable_for_another_reason():
    """In the norm ‖x‖² = xᵀ M_t x the step is I - c p pᵀ with p unit and 0 < c <= 1: its norm is exactly 1."""
    d = 16
    for same in (False, True):
        k, w, M = _directions(200, d, same=same)
        for t in range(0, 200, 7):
            c = k[t] @ w[t]
            assert 0 < c <= 1 + 1e-12
            L = torch.linalg.cholesky(M[t])  # ‖x‖_M = ‖Lᵀ x‖
            step = L.mT @ _jacobian(k[t], w[t]) @ torch.linalg.inv(L.mT)
            p = unit(L.mT @ w[t])
            torch.testing.assert_close(step, torch.eye(d, dtype=F64) - c * torch.outer(p, p))
            assert torch.linalg.matrix_norm(step, 2).item() == pytest.approx(1, abs=1e-10)


def test_growth_is_at_most_polynomial():
    """Over T steps ‖x‖²_M grows at most by ∏ δ_t = det M_T/det M_0 <= (1 + T/(d λ0))^d; measured, it decays."""
    d, T, penalty = 8, 2_000, 0.1
    k, w, M = _directions(T, d, penalty)
    logdet = torch.logdet(M[-1]) - d * math.log(penalty)
    assert logdet <= d * math.log(1 + T / (d * penalty)) + 1e-9
    product, norms = torch.eye(d, dtype=F64), []
    for t in range(T):
        product = _jacobian(k[t], w[t]) @ product
        norms.append(torch.linalg.matrix_norm(product, 2).item())
    weighted = torch.linalg.matrix_norm(torch.linalg.cholesky(M[-1]).mT @ product, 2) ** 2 / penalty
    assert weighted.log() <= logdet + 1e-9
    assert max(norms) < 10 and norms[-1] < 1


# Equation (12)

def test_composition_order_of_equation_12():
    """Paper: (F_r F_l, F_r G_l + G_r), F on the left. True: S_t = S_{t-1} F_t + v_t α̂ᵀ, (F_l F_r, G_l F_r + G_r)."""
    d, T = 16, 60
    k, w, _ = _directions(T, d)
    v = _normal(T, d, seed=9)
    eye = torch.eye(d, dtype=F64)
    S = torch.zeros(d, d, dtype=F64)
    right, paper = (eye, torch.zeros(d, d, dtype=F64)), (eye, torch.zeros(d, d, dtype=F64))
    for t in range(T):
        S = S + torch.outer(v[t] - S @ k[t], w[t])
        F, G = eye - torch.outer(k[t], w[t]), torch.outer(v[t], w[t])
        right = (right[0] @ F, right[1] @ F + G)
        F = eye - torch.outer(w[t], k[t])
        paper = (F @ paper[0], F @ paper[1] + G)
    torch.testing.assert_close(right[1], S, atol=1e-11, rtol=0)
    assert torch.linalg.matrix_norm(paper[1] - S) > torch.linalg.matrix_norm(S)


def test_stretches_compose_in_the_right_order():
    d, cut, T = 8, 23, 60
    k, w, _ = _directions(T, d)
    v = _normal(T, d, seed=9)

    def stretch(a, b):
        F, G = torch.eye(d, dtype=F64), torch.zeros(d, d, dtype=F64)
        for t in range(a, b):
            step = torch.eye(d, dtype=F64) - torch.outer(k[t], w[t])
            F, G = F @ step, G @ step + torch.outer(v[t], w[t])
        return F, G

    (F_l, G_l), (F_r, G_r), (F, G) = stretch(0, cut), stretch(cut, T), stretch(0, T)
    torch.testing.assert_close(F_l @ F_r, F)
    torch.testing.assert_close(G_l @ F_r + G_r, G)


# The special cases of section 3.5

def test_no_penalty_update_is_the_delta_rule_not_linear_attention():
    """u = 0 keeps A = I/λ0, so α̂ = k̂: the delta rule with β = 1. Linear attention drops the residual as well."""
    q, k, v = (_normal(1, 90, 2, 8, seed=s) for s in range(3))
    frozen = vla(q, k, v, torch.zeros_like(k), output_final_state=True)
    fixed = vla(q, k, v, write_rule="fixed", output_final_state=True)
    linear = vla(q, k, v, write_rule="linear", output_final_state=True)
    torch.testing.assert_close(frozen.o, fixed.o, atol=1e-12, rtol=0)
    torch.testing.assert_close(frozen.final_state.S, fixed.final_state.S, atol=1e-12, rtol=0)
    assert (frozen.o - linear.o).norm() > 0.1 * linear.o.norm()


# Proposition 3

@pytest.mark.parametrize("n", [8, 16])
def test_exact_recovery_is_a_property_of_the_gain(n):
    """For n <= d independent keys S_n k̂_i = v_i: true for w = A_t k̂ with u = k̂ and λ0 -> 0, not for the unit write."""
    d = 16
    k, v = _normal(1, n, 1, d), _normal(1, n, 1, d, seed=1)
    keys = unit(features(k[0, :, 0], "elu1"))

    def error(rule, penalty, u=None):
        S = vla(k, k, v, u, write_rule=rule, penalty=penalty, output_final_state=True).final_state.S[0, 0]
        return ((keys @ S.mT - v[0, :, 0]).norm() / v.norm()).item()

    # In proportion to λ0, as exact recovery in the limit is; 8 keys: 0.07, 8e-4, 8e-6, 16 keys: 0.3, 0.035, 4e-4.
    assert error("gain", 1e-6) < 1e-3
    assert error("gain", 1e-2) > error("gain", 1e-4) > 50 * error("gain", 1e-6)
    assert error("unit", 1e-6, _normal(1, n, 1, d, seed=2)) > 0.1


# Proposition 1 and the growth of the state

def _lengths(write_rule, d=32, T=8_192):
    q, k, v, u = _inputs(T, d)
    return vla(q, k, v, u, write_rule=write_rule, diagnostics=True, chunk_size=64).diagnostics


def test_state_norm_reaches_a_plateau_where_linear_attention_grows():
    at = [1_000 // 64, 8_192 // 64 - 1]
    ours, linear = (_lengths(rule).state_norm[0, at, 0].tolist() for rule in ("unit", "linear"))
    assert 0.7 < ours[1] / ours[0] < 1.3 and max(ours) < 40
    assert linear[1] / linear[0] > 2 and linear[1] > 20 * ours[1]


def test_the_residual_does_not_vanish():
    """Paper's proof of Prop. 1: e_t -> 0. Measured: ‖e‖/‖v‖ stays near 1.1 on random input."""
    d, T = 32, 4_096
    q, k, v, u = _inputs(T, d)
    residual = vla(q, k, v, u, diagnostics=True).diagnostics.residual_norm[0, -512:, 0]
    ratio = (residual / v[0, -512:, 0].norm(dim=-1)).mean()
    assert 0.9 < ratio < 1.4


def test_the_denominator_makes_the_output_fade():
    """φ(q)·z grows like T while S is bounded: o fades like 1/T with the paper's read-out, not with `headwise`."""
    q, k, v, u = _inputs(4_096, 16)
    size = {r: vla(q, k, v, u, readout=r).o.norm(dim=-1)[0, :, 0] for r in ("normalized", "headwise")}
    faded, kept = ((x[-256:].mean() / x[256:512].mean()).item() for x in size.values())
    assert 0.5 * 384 / 3968 < faded < 2 * 384 / 3968 and 0.8 < kept < 1.2


# The gain is recursive least squares, and MesaNet's memory

def test_gain_memory_is_the_least_squares_solution_and_mesa_reads_it():
    d, T, penalty = 12, 150, 0.1
    q, k, v = (_normal(1, T, 1, d, seed=s) for s in range(3))
    out = vla(q, k, v, write_rule="gain", penalty=penalty, readout="headwise", output_final_state=True)
    keys, values = unit(features(k[0, :, 0], "elu1")), v[0, :, 0]
    solution = values.mT @ keys @ torch.linalg.inv(penalty * torch.eye(d, dtype=F64) + keys.mT @ keys)
    torch.testing.assert_close(out.final_state.S[0, 0], solution, atol=1e-11, rtol=0)
    mesa = vla(q, k, v, write_rule="mesa", penalty=penalty, readout="headwise", output_final_state=True)
    torch.testing.assert_close(mesa.o, out.o, atol=1e-11, rtol=0)
    # A state handed over mid-way is the same thing for both.
    half = vla(q[:, :70], k[:, :70], v[:, :70], write_rule="gain", readout="headwise", output_final_state=True)
    rest = vla(q[:, 70:], k[:, 70:], v[:, 70:], write_rule="mesa", readout="headwise",
               initial_state=State(half.final_state.S, half.final_state.A))
    torch.testing.assert_close(rest.o, out.o[:, 70:], atol=1e-10, rtol=0)
