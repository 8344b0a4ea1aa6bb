"""Bad input: one clear message with the value, what was expected and the mend."""

from dataclasses import replace

import pytest
import torch

from kernels import State, delta_rule, mesa, vla, vla_step

B, T, H, D = 2, 6, 2, 4


def _x(*shape, dtype=torch.float32):
    return torch.ones(*(shape or (B, T, H, D)), dtype=dtype)


def _cu(*bounds):
    return torch.tensor(bounds)


ONE = (1, T, H, D)
BAD = {
    "k of another length": (dict(k=_x(B, T + 1, H, D)), ValueError,
                            r"k has shape \[2, 7, 2, 4\]; expected \[2, 6, 2, 4\]"),
    "v of another batch": (dict(v=_x(1, T, H, D)), ValueError, "v has shape"),
    "u of another width": (dict(u=_x(B, T, H, D + 1)), ValueError, "u has shape"),
    "three dimensions": (dict(q=_x(B, T, D)), ValueError, r"q has shape \[2, 6, 4\]; expected \[B, T, H, D\]"),
    "no tokens": (dict(q=_x(B, 0, H, D)), ValueError, "no dimension of size 0"),
    "beta with a feature axis": (dict(beta=_x()), ValueError, r"beta has shape .* one number per token and head"),
    "integer keys": (dict(k=_x(dtype=torch.int64)), TypeError, "k has dtype torch.int64; convert it to float32"),
    "integer beta": (dict(beta=_x(B, T, H, dtype=torch.int32)), TypeError, "beta has dtype torch.int32"),
    "mixed dtypes": (dict(v=_x(dtype=torch.float64)), TypeError, "v has dtype torch.float64 and q torch.float32"),
    "a list": (dict(k=[1.0]), TypeError, "k is a list"),
    "zero penalty": (dict(penalty=0.0), ValueError, r"penalty \(λ0\) is 0.0; it must be positive"),
    "negative penalty": (dict(penalty=-0.1), ValueError, "is -0.1"),
    "nan penalty": (dict(penalty=float("nan")), ValueError, "penalty"),
    "one bad head": (dict(penalty=torch.tensor([0.1, -2.0])), ValueError, "is -2.0"),
    "penalties of other heads": (dict(penalty=torch.ones(3)), ValueError, r"penalty has shape \[3\]; expected \[2\]"),
    "a penalty in words": (dict(penalty="small"), TypeError, "penalty is a str"),
    "integer penalties": (dict(penalty=torch.tensor([1, 2])), TypeError, "penalty has dtype torch.int64"),
    "unknown rule": (dict(write_rule="v3"), ValueError, "write_rule is 'v3'; choose one of 'unit', 'gain'"),
    "unknown readout": (dict(readout="none"), ValueError, "readout is 'none'"),
    "unknown erase key": (dict(erase_key="none"), ValueError, "erase_key is 'none'"),
    "unknown feature map": (dict(feature_map="relu"), ValueError, "feature_map is 'relu'"),
    "unknown scale": (dict(u_scale="d"), ValueError, "u_scale is 'd'"),
    "unknown backend": (dict(backend="cuda"), ValueError, "backend is 'cuda'; choose one of 'auto'"),
    "chunk of zero": (dict(chunk_size=0), ValueError, "chunk_size is 0"),
    "half a chunk": (dict(chunk_size=0.5), ValueError, "chunk_size is 0.5"),
    "normalized with decay": (dict(g=_x(B, T, H)), ValueError, "use readout='headwise', or leave g out"),
    "packed with a batch": (dict(cu_seqlens=_cu(0, T)), ValueError, "batch size 2; packed documents need batch size 1"),
    "refresh in chunks": (dict(refresh=(20, 1e-3), backend="chunked"), ValueError, "backend='reference'"),
    "refresh of nothing": (dict(refresh=(20, 1e-3), write_rule="fixed"), ValueError, "leave it out"),
    "half a refresh": (dict(refresh=20), ValueError, "give a pair"),
    "mesa with scaled keys": (dict(write_rule="mesa", u=None, u_scale="inverse_sqrt_d"), ValueError,
                              "leave u_scale at 'unit'"),
    "a penalty below rounding": (dict(penalty=1e-7), ValueError, "is 1e-07; it must be positive, from 1e-6 to 1e6"),
    "a penalty past all floats": (dict(penalty=10**400), ValueError, "from 1e-6 to 1e6, for example 0.1"),
    "a large penalty of one head": (dict(penalty=torch.tensor([0.1, 1e7])), ValueError, "is 10000000.0"),
    "refresh never": (dict(refresh=(0, 1e-3)), ValueError, "must be a positive whole number"),
    "refresh by a word": (dict(refresh=(2, "a")), ValueError, "must be a positive whole number"),
    "mesa with u": (dict(u=_x(), write_rule="mesa"), ValueError, "takes no u; leave u out"),
    "mesa with beta": (dict(beta=_x(B, T, H), write_rule="mesa"), ValueError, "takes no beta"),
    "mesa with raw keys": (dict(erase_key="raw", write_rule="mesa"), ValueError, "'mesa' uses unit keys"),
    "not a state": (dict(initial_state=_x()), TypeError, "initial_state is a Tensor"),
    "state without A": (dict(initial_state=State(_x(B, H, D, D), None, _x(B, H, D))), ValueError,
                        "initial_state.A is missing"),
    "state with z": (dict(initial_state=State.initial(B, H, D, D), readout="headwise"), ValueError,
                     "initial_state.z is given"),
    "state of another batch": (dict(initial_state=State.initial(3, H, D, D)), ValueError,
                               r"initial_state.S has shape \[3, 2, 4, 4\]; expected \[2, 2, 4, 4\]"),
    "state in bfloat16": (dict(initial_state=State.initial(B, H, D, D, dtype=torch.bfloat16)), TypeError,
                          "states are float32 or float64"),
    "state with another rest": (dict(initial_state=replace(State.initial(B, H, D, D), A_rest=_x(B, H, 3, 3))),
                                ValueError, r"initial_state.A_rest has shape \[2, 2, 3, 3\]"),
    "state not definite": (dict(initial_state=State(_x(B, H, D, D), -_x(B, H, D, D), _x(B, H, D))), ValueError,
                           "not positive definite"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_with_a_message(case):
    changes, error, message = BAD[case]
    arguments = dict(q=_x(), k=_x(), v=_x()) | changes
    if case in ("three dimensions", "no tokens"):
        arguments |= dict(k=arguments["q"], v=arguments["q"])
    with pytest.raises(error, match=message):
        vla(**arguments)


@pytest.mark.parametrize("bounds,message", [
    (_cu(0, 3), "runs from 0 to 3 and does not cover the 6 tokens"),
    (_cu(0, 9), "does not cover the 6 tokens"),
    (_cu(1, 6), "must start at 0"),
    (_cu(0, 3, 3, 6), "document 1 the length 0"),
    (_cu(0, 4, 2, 6), "document 1 the length -2"),
    (_cu(0), r"expected \[N \+ 1\]"),
])
@pytest.mark.parametrize("operator", ["vla", "delta_rule"])
def test_document_boundaries(bounds, message, operator):
    x = _x(*ONE)
    with pytest.raises(ValueError, match=message):
        vla(x, x, x, cu_seqlens=bounds) if operator == "vla" else delta_rule(x, x, x, x, cu_seqlens=bounds)


def test_document_boundaries_are_whole_numbers():
    x = _x(*ONE)
    with pytest.raises(TypeError, match="give an int32 or int64 tensor"):
        vla(x, x, x, cu_seqlens=torch.tensor([0.0, 6.0]))
    with pytest.raises(TypeError, match="cu_seqlens is list; give"):
        vla(x, x, x, cu_seqlens=[0, 6])


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_the_result_is_right_at_the_ends_of_the_penalty(penalty, backend):
    # u = k̂ of rank 2: A_t x from the exact inverse, which in their plane is one of a 2 x 2 matrix.
    gen = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(16, 2, generator=gen, dtype=torch.float64))[0]
    plane = torch.randn(2, 2, generator=gen, dtype=torch.float64)
    plane = (plane / plane.norm(dim=-1, keepdim=True))[torch.randint(2, (100,), generator=gen)]
    k, v = (plane @ basis.mT).view(1, 100, 1, 16), torch.ones(1, 100, 1, 16, dtype=torch.float64)
    S = torch.zeros(16, 2, dtype=torch.float64)
    M = penalty * torch.eye(2, dtype=torch.float64)
    for key in plane:
        M = M + key[:, None] * key
        a = torch.linalg.solve(M, key)
        S = S + (1 - S @ key)[:, None] * (a / a.norm())
    found = vla(k, k, v, penalty=torch.tensor([penalty]), feature_map="identity", readout="headwise",
                backend=backend, output_final_state=True).final_state.S[0, 0]
    assert (found - S @ basis.mT).norm() < 1e-6 * S.norm()


def test_step_takes_one_token():
    with pytest.raises(ValueError, match="vla_step takes one token"):
        vla_step(_x(), _x(), _x())


def test_delta_rule_checks_its_arguments():
    with pytest.raises(ValueError, match=r"expected \[N, H, Dv, Dk\] = \[2, 2, 4, 4\]"):
        delta_rule(_x(), _x(), _x(), _x(), initial_state=_x(1, H, D, D))
    with pytest.raises(ValueError, match="chunk_size is 0"):
        delta_rule(_x(), _x(), _x(), _x(), chunk_size=0)


def test_mesa_is_the_gain_s_memory_and_takes_the_same_options():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 1, 8, generator=gen, dtype=torch.float64) for _ in range(3))
    out = mesa(q, k, v, penalty=0.2, output_final_state=True)
    gain = vla(q, k, v, write_rule="gain", penalty=0.2, output_final_state=True)
    torch.testing.assert_close(out.o, gain.o, atol=1e-12, rtol=0)
    torch.testing.assert_close(out.final_state.S, gain.final_state.S, atol=1e-12, rtol=0)


def test_refresh_changes_a_every_so_many_tokens():
    # λ0 = 1, u along one axis: without refresh A_11 = 1/(1 + t), and each refresh adds its amount.
    x = torch.ones(1, 5, 1, 2, dtype=torch.float64)
    u = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 5, 1, 2)
    A = vla(x, x, x, u, penalty=1.0, refresh=(2, 0.5), output_final_state=True).final_state.A[0, 0]
    first = 1.0
    for t in range(1, 6):
        first = first / (1 + first) + (0.5 if t % 2 == 0 else 0)
    torch.testing.assert_close(A, torch.diag(torch.tensor([first, 2.0], dtype=torch.float64)))
