"""float32 and bfloat16 against float64, and every numerical trap of kernels/README.md."""

import pytest
import torch
from kernel_cases import VARIANTS, assert_close, make_inputs, relative_errors, run

from kernels import State, delta_rule, vla, vla_step
from kernels.features import unit
from kernels.grid import make_grid
from kernels.write_direction import write_direction

LONG = 65_536


def _low_rank(rank, tokens, d, seed=0):
    """[1, T, 1, d] float32: `rank` distinct directions, each repeated (repetitive text); None: full rank."""
    gen = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(1, tokens, 1, d, generator=gen)
    directions = torch.randn(rank, d, generator=gen)
    return directions[torch.randint(rank, (tokens,), generator=gen)].view(1, tokens, 1, d)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_and_bfloat16(variant):
    leaves, options = make_inputs(variant, "headwise", 1, 257, 2, 32, 32, dtype=torch.bfloat16, gates=True)
    truth = run({n: None if x is None else x.double() for n, x in leaves.items()}, options)
    # float32 computes with 24 bits; unit keys after elu+1 are correlated 0.9, which costs about two digits.
    single = run({n: None if x is None else x.float() for n, x in leaves.items()}, options)
    assert single["o"].dtype == single["S_T"].dtype == torch.float32
    assert_close(single, truth, 2e-4)
    # bfloat16 input is computed in float32 and only the results are rounded (8 bits: half an ulp is 2e-3); states and
    # gradients of states stay float32.
    half = run(leaves, options)
    assert half["o"].dtype == half["dq"].dtype == torch.bfloat16 and half["S_T"].dtype == torch.float32
    outputs = ("o", "S_T", "A_T")
    assert_close({n: half[n] for n in outputs if n in half}, {n: truth[n] for n in outputs if n in truth}, 5e-3)
    # The incoming gradient is rounded to 8 bits at every token; dλ0 and dg are sums over all of them that cancel.
    assert_close(half, truth, 0.1)
    assert_close({"S_T": half["S_T"]}, {"S_T": truth["S_T"]}, 2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_gradients_of_short_pieces(dtype):
    leaves, options = make_inputs("unit", "normalized", 1, 3, 2, 16, 16, with_state=True, gates=False)
    state = {name: leaves.pop(name).float() for name in ("S", "A", "z")}
    leaves = {name: None if x is None else x.to(dtype) for name, x in leaves.items()}
    truth = run({n: None if x is None else x.double() for n, x in (leaves | state).items()}, options)
    results = run(leaves | state, options)
    for name in ("dS", "dA", "dz"):
        assert results[name].dtype == torch.float32
    # The loss enters through o, rounded to the dtype of v.
    assert_close({n: results[n] for n in ("dS", "dA", "dz")}, {n: truth[n] for n in ("dS", "dA", "dz")},
                 1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("inside", [False, True], ids=["outside-the-span", "inside-the-span"])
@pytest.mark.parametrize("rank", [1, 4, 16, 48, None])
def test_long_low_rank(rank, inside):
    """T = 65,536: inside the span of the u's ‖a‖ is 1e-5 beside A's 10. Wanted: 1e-3 outside, 1e-2 inside."""
    d = 64
    k = _low_rank(rank if inside else None, LONG, d)
    u = None if inside else _low_rank(rank, LONG, d, seed=1)
    q, v = _low_rank(None, LONG, d, seed=2), _low_rank(None, LONG, 16, seed=3)
    # Values that bfloat16 holds, so that one float64 truth serves both.
    inputs = [None if x is None else x.bfloat16() for x in (q, k, v, u)]
    options = dict(readout="headwise", output_final_state=True)
    with torch.no_grad():
        truth, single = (vla(*(None if x is None else x.to(dtype) for x in inputs), **options)
                         for dtype in (torch.float64, torch.float32))
        half = vla(*inputs, **options)
    # Measured 3e-7 to 8e-6 relative in S; o likewise in the mean (a head norm enlarges the error of an empty read-out).
    for out, bound in ((single, 1e-4), (half, 4e-3)):  # 4e-3: the rounding of o to 8 bits
        A = out.final_state.full_penalty_inverse()
        assert_close({"S": out.final_state.S, "A": A}, {"S": truth.final_state.S, "A": truth.final_state.A}, 1e-4)
        assert (out.o - truth.o).square().mean().sqrt() < bound * truth.o.square().mean().sqrt()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rank", [1, 4, 16, 48])
def test_write_direction_against_a_direct_solve(rank, inside):
    d = 64
    u = unit(_low_rank(rank, LONG, d).double())[0, :, 0]
    x = u if inside else unit(_low_rank(None, LONG, d, seed=1).double())[0, :, 0]
    chunks = [None if inside else x.view(-1, 64, d), u.view(-1, 64, d)]
    a, _ = write_direction(*chunks, 0.1 * torch.eye(d, dtype=torch.float64)[None],
                           make_grid(1, LONG, 1, 64, None, u.device))
    for t in (63, 64, 5_000, LONG - 1):
        M = 0.1 * torch.eye(d, dtype=torch.float64) + u[: t + 1].mT @ u[: t + 1]
        torch.testing.assert_close(unit(a.reshape(LONG, d)[t]), unit(torch.linalg.solve(M, x[t])), atol=1e-6, rtol=0)


def test_the_traps_are_real():
    """What the float64 write direction avoids: a float32 prefix sum of M, and float32 rank-one updates of A."""
    d, tokens = 64, LONG
    u = unit(_low_rank(1, tokens, d).double())[0, :, 0]
    running = 0.1 * torch.eye(d)
    for gram in (u.view(-1, 64, d).mT @ u.view(-1, 64, d)).float():
        running = running + gram
    assert torch.linalg.eigvalsh(running.double())[0] < 0  # not even definite any more
    A = torch.linalg.inv(0.1 * torch.eye(d, dtype=torch.float64) + u.mT @ u)
    rounded = unit(A.float().double() @ u[0]) - unit(A @ u[0])  # A handed on in float32 alone
    assert rounded.abs().max() > 1e-3


def test_a_state_keeps_what_float32_cannot_hold():
    """Carried over 64 calls, repetitive keys: with A_rest the result is that of one call; with A alone it is not."""
    k, d, tokens = _low_rank(2, LONG, 32), 32, LONG
    q, v = _low_rank(None, tokens, d, seed=6), _low_rank(None, tokens, d, seed=7)
    options = dict(readout="headwise", output_final_state=True, feature_map="identity")
    whole = vla(q.double(), k.double(), v.double(), **options).o[:, -256:]
    errors = []
    for keep in (True, False):
        state, piece = None, tokens // 4
        for a in (*range(0, tokens - piece, piece), *range(tokens - piece, tokens, piece)):
            out = vla(q[:, a:a + piece], k[:, a:a + piece], v[:, a:a + piece], initial_state=state, **options)
            state = out.final_state
            state = state if keep else State(state.S, state.A, state.z)
        errors.append((out.o[:, -256:] - whole).abs().max() / whole.abs().max())
    assert errors[0] < 1e-4 < errors[1]


@pytest.mark.parametrize("rank", [1, None])
def test_decoding_after_a_long_past(rank):
    d, past, more = 32, LONG, 128
    k, u = _low_rank(rank, past + more, d), _low_rank(rank, past + more, d, seed=1)
    q, v = _low_rank(None, past + more, d, seed=2), _low_rank(None, past + more, d, seed=3)
    options = dict(readout="headwise")
    truth = vla(*(x.double() for x in (q, k, v, u)), **options).o[:, past:]
    state = vla(*(x[:, :past] for x in (q, k, v, u)), output_final_state=True, **options).final_state
    outputs = []
    for t in range(past, past + more):
        out = vla_step(*(x[:, t] for x in (q, k, v, u)), state=state, **options)
        state = out.final_state
        outputs.append(out.o)
    assert state.A.dtype == torch.float64
    assert_close({"o": torch.stack(outputs, 1)}, {"o": truth}, 1e-5)


def test_decoding_adds_no_error_over_many_steps():
    # 4,000 rank-one updates in float64 against a direct inverse (a million: README, "Numbers").
    d, tokens = 16, 4_000
    u = _low_rank(3, tokens, d)[0]
    state = None
    q = v = torch.ones(1, 1, d)
    for t in range(tokens):
        state = vla_step(q, q, v, u[t][None], state, readout="headwise").final_state
    directions = unit(u[:, 0].double())
    M = 0.1 * torch.eye(d, dtype=torch.float64) + directions.mT @ directions
    torch.testing.assert_close(unit(state.A[0, 0] @ directions[0]), unit(torch.linalg.solve(M, directions[0])),
                               atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-11), (torch.float32, 2e-4), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("keys", ["repeated", "collinear", "almost-repeated"])
def test_repeated_and_collinear_keys(keys, dtype, bound):
    gen = torch.Generator().manual_seed(0)
    base, T = torch.randn(1, 1, 1, 32, generator=gen), 130
    k = {"repeated": base.expand(1, T, 1, 32),
         "collinear": base * torch.linspace(0.1, 3, T).view(1, T, 1, 1),
         "almost-repeated": base + 1e-3 * torch.randn(1, T, 1, 32, generator=gen)}[keys]
    q, v = torch.randn(1, T, 1, 32, generator=gen), torch.randn(1, T, 1, 32, generator=gen)
    for variant in ("fixed", "unit-key", "gain-key"):
        leaves = dict(q=q, k=k, v=v, u=None, penalty=torch.tensor([0.1]), beta=None, g=None, S=None, A=None, z=None)
        leaves = {n: None if x is None else x.to(torch.float64 if n == "penalty" else dtype)
                  for n, x in leaves.items()}
        options = dict(write_rule=VARIANTS[variant]["write_rule"], readout="normalized")
        truth = run({n: None if x is None else x.double() for n, x in leaves.items()}, options, backend="reference")
        errors = relative_errors(run(leaves, options), truth)
        assert errors["o"] <= bound and errors["S_T"] <= bound, (variant, errors)
        assert all(error <= 20 * bound for error in errors.values()), (variant, errors)


def test_the_solve_of_correlated_keys_is_not_by_squaring():
    """Unit keys of positive features are correlated 0.9; (I - N)(I + N²)(I + N⁴)… loses every digit in float32."""
    gen = torch.Generator().manual_seed(0)
    k = unit(1 + torch.rand(1, 64, 1, 32, generator=gen, dtype=torch.float64))
    v = torch.randn(1, 64, 1, 32, generator=gen, dtype=torch.float64)
    truth = delta_rule(k, k, k, v, output_final_state=True)[1]
    ours = delta_rule(k.float(), k.float(), k.float(), v.float(), output_final_state=True)[1]
    assert_close({"S": ours}, {"S": truth}, 1e-4)
    K = k[0, :, 0].float()
    power, inverse = -(K @ K.mT).tril(-1), torch.eye(64)
    for _ in range(6):
        inverse = inverse + inverse @ power
        power = power @ power
    by_squaring = (inverse @ v[0, :, 0].float()).mT @ K
    error = (by_squaring - truth[0, 0]).abs().max() / truth.abs().max()
    assert not error < 10


def test_float16_and_autocast():
    leaves, options = make_inputs("unit", "headwise", 1, 100, 2, 16, 16, gates=False, dtype=torch.float16)
    truth = run({n: None if x is None else x.double() for n, x in leaves.items()}, options)
    assert_close({"o": run(leaves, options)["o"]}, {"o": truth["o"]}, 2e-3)
    single = {n: None if x is None else x.float() for n, x in leaves.items()}
    plain = run(single, options)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # forward and backward both inside
        inside = run(single, options)
    assert inside["o"].dtype == torch.float32
    assert all(torch.equal(inside[name], plain[name]) for name in plain)
