"""The generalised delta rule as its own function, against a token loop."""

import pytest
import torch
from kernel_cases import assert_close

from kernels import delta_rule, vla


def _loop(q, erase, write, v, beta, g, S):
    outputs = []
    for t in range(q.shape[1]):
        S = S if g is None else S * g[:, t].exp()[..., None, None]
        e = v[:, t] if erase is None else v[:, t] - (S @ erase[:, t, ..., None]).squeeze(-1)
        e = e if beta is None else e * beta[:, t, :, None]
        S = S + e[..., None] * write[:, t, :, None, :]
        outputs.append((S @ q[:, t, ..., None]).squeeze(-1))
    return torch.stack(outputs, 1), S


def _inputs(tokens, erase=True, beta=True, g=True, rows=2, heads=2, dk=12, dv=20):
    gen = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    x = dict(q=normal(rows, tokens, heads, dk), erase=normal(rows, tokens, heads, dk) / dk**0.5 if erase else None,
             write=normal(rows, tokens, heads, dk) / (4 * dk**0.5), v=normal(rows, tokens, heads, dv),
             beta=torch.rand(rows, tokens, heads, generator=gen, dtype=torch.float64) * 2 if beta else None,
             g=-torch.rand(rows, tokens, heads, generator=gen, dtype=torch.float64) if g else None,
             S=normal(rows, heads, dv, dk))
    return {name: None if y is None else y.requires_grad_() for name, y in x.items()}


@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
@pytest.mark.parametrize("parts", [(True, True, True), (True, False, False), (True, False, True), (False, True, True),
                                   (False, False, False)], ids=str)
def test_equals_the_token_loop(parts, tokens):
    x = _inputs(tokens, *parts)
    names = [name for name, y in x.items() if y is not None]
    results = []
    for function in (_loop, lambda *a: delta_rule(*a, output_final_state=True)):
        o, S = function(*x.values())
        grads = torch.autograd.grad(o.sin().sum() + S.cos().sum(), [x[name] for name in names])
        results.append({"o": o, "S": S} | {"d" + name: y for name, y in zip(names, grads)})
    assert_close(results[1], results[0], 1e-12)


def test_gradcheck():
    x = _inputs(7, rows=1, heads=1, dk=3, dv=2)
    assert torch.autograd.gradcheck(lambda *a: delta_rule(*a, output_final_state=True, chunk_size=3), list(x.values()))


def test_strong_decay_underflows_to_forgetting():
    x = _inputs(100, erase=True, beta=False)
    x["g"] = torch.full_like(x["g"], -300.0).requires_grad_()  # the factors over a chunk are far below 1e-308
    o, _ = delta_rule(*x.values())
    expected = (x["q"] * x["write"]).sum(-1, keepdim=True) * x["v"]
    assert_close({"o": o}, {"o": expected}, 1e-12)
    o.sum().backward()
    assert all(torch.isfinite(y.grad).all() for y in x.values() if y is not None)


def test_without_erase_key_it_is_linear_attention():
    x = _inputs(90, erase=False, beta=False, g=False)
    o, _ = delta_rule(x["q"], None, x["write"], x["v"])
    scores = torch.einsum("bthd,bshd->bhts", x["q"], x["write"]).tril()
    assert_close({"o": o}, {"o": torch.einsum("bhts,bshd->bthd", scores, x["v"])}, 1e-12)


def test_fixed_and_deltanet_use_it_unchanged():
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 80, 2, 8, generator=gen, dtype=torch.float64) for _ in range(3))
    beta = torch.rand(1, 80, 2, generator=gen, dtype=torch.float64)
    unit = torch.nn.functional.normalize(k, dim=-1)
    for strength in (None, beta):
        _, S = delta_rule(q, unit, unit, v, strength, output_final_state=True)
        final = vla(q, k, v, beta=strength, write_rule="fixed", feature_map="identity", output_final_state=True)
        torch.testing.assert_close(final.final_state.S, S, atol=1e-13, rtol=0)
