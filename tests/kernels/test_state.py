"""The state contract: split and carried, packed and separate, decoded token by token; nothing leaks."""

import pytest
import torch
from kernel_cases import VARIANTS, assert_close, make_inputs, run

from kernels import State, vla, vla_step

TENSORS = ("q", "k", "v", "u", "penalty", "beta", "g")


def _cut(leaves, tokens, rows=slice(None)):
    """The leaves of a stretch of tokens, and of some initial states."""
    cut = dict(leaves)
    for name in ("q", "k", "v", "u", "beta", "g"):
        cut[name] = None if leaves[name] is None else leaves[name][:, tokens]
    for name in ("S", "A", "z"):
        cut[name] = None if leaves[name] is None else leaves[name][rows]
    return cut


def _gradients(leaves):
    """Those that exist: `linear` uses neither λ0 nor β."""
    return {name: x.grad for name, x in leaves.items() if x is not None and x.grad is not None}


@pytest.mark.parametrize("readout", ["normalized", "headwise"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_equals_separate_forward_and_backward(variant, readout):
    bounds = [0, 70, 71, 135, 150]
    leaves, options = make_inputs(variant, readout, 1, 150, 2, 16, 16, sequences=4, with_state=True)
    packed = run(leaves, options, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), backward=False)
    for n, (a, b) in enumerate(zip(bounds, bounds[1:])):
        alone = run(_cut(leaves, slice(a, b), slice(n, n + 1)), options, backward=False)
        inside = {"o": packed["o"][:, a:b]} | {x: packed[x][n: n + 1] for x in packed if x != "o"}
        assert_close(inside, alone, 1e-12)
    # Backward: a loss on one document alone moves nothing of the others.
    x = {name: None if y is None else y.clone().requires_grad_() for name, y in leaves.items()}
    out = vla(*(x[name] for name in ("q", "k", "v", "u")), penalty=x["penalty"], beta=x["beta"], g=x["g"],
              initial_state=State(x["S"], x["A"], x["z"]), cu_seqlens=torch.tensor(bounds), **options)
    out.o[:, 71:135].sin().sum().backward()
    y = {name: None if z is None else z.clone().requires_grad_()
         for name, z in _cut(leaves, slice(71, 135), slice(2, 3)).items()}
    vla(*(y[name] for name in ("q", "k", "v", "u")), penalty=y["penalty"], beta=y["beta"], g=y["g"],
        initial_state=State(y["S"], y["A"], y["z"]), **options).o.sin().sum().backward()
    for name in ("q", "k", "v", "u", "beta", "g", "S", "A", "z"):
        if leaves[name] is not None and y[name].grad is not None:
            own = slice(2, 3) if name in "SAz" else slice(71, 135)
            grad = x[name].grad if name in "SAz" else x[name].grad[0]
            inside, outside = grad[own], torch.ones_like(grad).index_fill(0, torch.arange(own.start, own.stop), 0)
            assert_close({name: inside}, {name: y[name].grad if name in "SAz" else y[name].grad[0]}, 1e-12)
            assert not (grad * outside).any(), f"gradient of {name} leaks across documents"


@pytest.mark.parametrize("variant", ["unit", "unit-key", "gain-key", "fixed", "linear", "mesa"])
@pytest.mark.parametrize("cut", [1, 64, 77])
def test_split_with_carried_state_equals_whole(variant, cut):
    leaves, options = make_inputs(variant, "normalized", 2, 130, 2, 16, 16)
    whole = {name: None if x is None else x.clone().requires_grad_() for name, x in leaves.items()}
    split = {name: None if x is None else x.clone().requires_grad_() for name, x in leaves.items()}

    def call(x, tokens, state):
        x = _cut(x, tokens)
        return vla(*(x[n] for n in ("q", "k", "v", "u")), penalty=x["penalty"], beta=x["beta"], g=x["g"],
                   initial_state=state, output_final_state=True, **options)

    one = call(whole, slice(None), None)
    first = call(split, slice(0, cut), None)
    second = call(split, slice(cut, None), first.final_state)
    o = torch.cat([first.o, second.o], 1)
    one.o.sin().sum().backward()
    o.sin().sum().backward()
    results = {"o": o, "S": second.final_state.S} | _gradients(split)
    truth = {"o": one.o, "S": one.final_state.S} | _gradients(whole)
    assert_close(results, truth, 1e-12)


@pytest.mark.parametrize("readout", ["normalized", "headwise"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_step_equals_vla(variant, readout):
    leaves, options = make_inputs(variant, readout, 2, 20, 2, 12, 8)
    whole = run(leaves, options, backward=False)
    state, outputs = None, []
    for t in range(20):
        x = {name: y[:, t] if name not in ("penalty",) and y is not None else y
             for name, y in leaves.items() if name in TENSORS}
        if t % 2:  # both shapes: [B, H, D] and [B, 1, H, D]
            x = {name: y[:, None] if name != "penalty" and y is not None else y for name, y in x.items()}
        out = vla_step(**x, state=state, **options)
        state = out.final_state
        outputs.append(out.o if t % 2 else out.o[:, None])
    results = {"o": torch.cat(outputs, 1), "S_T": state.S, "A_T": state.A, "z_T": state.z}
    assert_close({name: results[name] for name in whole}, whole, 1e-11)


def test_decoding_goes_on_from_a_float32_prefill():
    leaves, options = make_inputs("unit-key", "headwise", 1, 300, 2, 16, 16, gates=False, dtype=torch.float32)
    truth = run({n: None if x is None else x.double() for n, x in leaves.items()}, options, backward=False)
    q, k, v, penalty = (leaves[name] for name in ("q", "k", "v", "penalty"))
    state = vla(q[:, :250], k[:, :250], v[:, :250], penalty=penalty, output_final_state=True, **options).final_state
    assert (state.S.dtype, state.A.dtype, state.A_rest.dtype) == (torch.float32,) * 3
    outputs = []
    for t in range(250, 300):
        out = vla_step(q[:, t], k[:, t], v[:, t], state=state, **options)
        state = out.final_state
        outputs.append(out.o)
    assert_close({"o": torch.stack(outputs, 1)}, {"o": truth["o"][:, 250:]}, 1e-5)
    again = vla(q[:, :64], k[:, :64], v[:, :64], initial_state=state, **options).o  # a decoded state is accepted too
    assert torch.isfinite(again).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 63, 100])
def test_memory_around_the_input_has_no_influence(tokens, packed):
    leaves, options = make_inputs("unit", "headwise", 1, tokens, 2, 16, 16)
    more = dict(cu_seqlens=torch.tensor([0, tokens // 2, tokens] if tokens > 1 else [0, 1])) if packed else {}
    truth = run(leaves, options, **more)
    poisoned = {}
    for name, x in leaves.items():
        if x is not None:  # views into buffers full of NaN, not contiguous either
            buffer = torch.full([2 * n + 3 for n in x.shape], float("nan"), dtype=x.dtype)
            view = buffer[tuple(slice(1, 1 + 2 * n, 2) for n in x.shape)]
            view.copy_(x)
            x = view
        poisoned[name] = x
    x = {name: poisoned[name].detach().requires_grad_() for name in TENSORS}
    assert not x["q"].is_contiguous()
    out = vla(**x, output_final_state=True, **options, **more)
    plain = {name: leaves[name].clone().requires_grad_() for name in TENSORS}
    expected = vla(**plain, output_final_state=True, **options, **more)
    out.o.sin().sum().backward()
    expected.o.sin().sum().backward()
    assert_close({"o": out.o, "S_T": out.final_state.S, "A_T": out.final_state.A},
                 {name: truth[name] for name in ("o", "S_T", "A_T")}, 1e-12)
    assert_close({name: x[name].grad for name in TENSORS}, {name: plain[name].grad for name in TENSORS}, 1e-12)


def test_padding_and_uninitialised_memory_are_never_read(monkeypatch):
    # Every torch.empty_like is filled with NaN: what is not written before it is read shows.
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **k: real(x, **k).fill_(float("nan"))
                        if x.is_floating_point() else real(x, **k))
    leaves, options = make_inputs("unit", "normalized", 1, 100, 2, 16, 16, sequences=3, with_state=True)
    results = run(leaves, options, cu_seqlens=torch.tensor([0, 65, 66, 100]))
    assert all(torch.isfinite(x).all() for x in results.values())


def test_state_helpers():
    state = State.initial(3, 2, 4, 5, penalty=torch.tensor([0.1, 0.5]), write_rule="gain", readout="normalized")
    assert state.S.shape == (3, 2, 5, 4) and state.z.shape == (3, 2, 4) and state.S.dtype == torch.float32
    torch.testing.assert_close(state.A[1, 1], 2 * torch.eye(4))
    assert State.initial(1, 1, 4, 4, write_rule="linear", readout="headwise").A is None
    picked = State(state.S + torch.arange(3.0).view(3, 1, 1, 1), state.A, state.z).index_select(torch.tensor([2, 0]))
    assert picked.S[:, 0, 0, 0].tolist() == [2, 0] and picked.A_rest is None
    assert not State(state.S.requires_grad_()).detach().S.requires_grad


@pytest.mark.parametrize(("options", "told"), [
    ({"penalty": 0.0}, "must be positive and finite"), ({"penalty": float("nan")}, "must be positive and finite"),
    ({"penalty": torch.ones(3)}, r"penalty has shape \[3\]; expected \[2\]"),
    ({"write_rule": "units"}, "write_rule is 'units'; choose one of"), ({"readout": "head"}, "readout is 'head'"),
])  # fmt: skip
def test_a_state_that_cannot_be_meant_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        State.initial(1, 2, 4, 4, **options)


def test_a_state_that_is_not_finite_is_refused():
    q = torch.randn(1, 3, 1, 4)
    state = State(torch.zeros(1, 1, 4, 4), torch.eye(4).mul(float("inf"))[None, None], torch.zeros(1, 1, 4))
    with pytest.raises(ValueError, match="not positive definite .or not finite.*State.initial"):
        vla(q, q, q, initial_state=state, backend="chunked")


def test_initial_state_equals_no_state():
    leaves, options = make_inputs("unit", "normalized", 2, 70, 2, 16, 8)
    truth = run(leaves, options, backward=False)
    start = State.initial(2, 2, 16, 8, leaves["penalty"], "unit", "normalized", torch.float64)
    out = vla(*(leaves[n] for n in ("q", "k", "v", "u")), beta=leaves["beta"], initial_state=start, **options)
    assert_close({"o": out.o}, {"o": truth["o"]}, 1e-12)
