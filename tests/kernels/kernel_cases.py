"""Inputs, one run with all its gradients, and the comparison, shared by the tests of the operator."""

import torch

from kernels import State, vla

# Every write rule, with its variants of erase key and of where u comes from ("given" or the unit key).
VARIANTS = {
    "unit": dict(write_rule="unit", u="given"),
    "unit-key": dict(write_rule="unit", u="key"),
    "unit-raw": dict(write_rule="unit", u="given", erase_key="raw"),
    "unit-scaled": dict(write_rule="unit", u="key", u_scale="inverse_sqrt_d"),
    "gain": dict(write_rule="gain", u="given"),
    "gain-key": dict(write_rule="gain", u="key"),
    "gain-raw": dict(write_rule="gain", u="given", erase_key="raw"),
    "fixed": dict(write_rule="fixed", u="key"),
    "fixed-raw": dict(write_rule="fixed", u="key", erase_key="raw"),
    "linear": dict(write_rule="linear", u="key"),
    "mesa": dict(write_rule="mesa", u="key"),
}
PENALISED = ("unit", "gain", "mesa")


def make_inputs(variant, readout, B, T, H, dk, dv, sequences=None, with_state=False, gates=True, seed=0,
                dtype=torch.float64):
    """Leaves of one call as a dict name -> tensor or None, and the options of `vla`."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    options = dict(VARIANTS[variant])
    given, rule = options.pop("u") == "given", options["write_rule"]
    raw = options.get("erase_key") == "raw"
    n = sequences or B
    leaves = dict(q=normal(B, T, H, dk), k=normal(B, T, H, dk), v=normal(B, T, H, dv),
                  u=normal(B, T, H, dk) if given else None, penalty=None, beta=None, g=None, S=None, A=None, z=None)
    # Raw keys are long, and the gain with an independent u is not least squares: at λ0 = 0.1 both blow up. Larger λ0
    # (and for raw keys smaller β) keep them finite over the length.
    scale = 1000 if raw else 10 if rule == "gain" and given else 1
    leaves["penalty"] = torch.linspace(0.1, 0.3, H, dtype=torch.float64) * scale
    if gates and rule != "mesa":
        leaves["beta"] = torch.rand(B, T, H, generator=gen, dtype=torch.float64) * (1 / dk if raw else 1.5)
        if readout == "headwise":
            leaves["g"] = -0.2 * torch.rand(B, T, H, generator=gen, dtype=torch.float64)
    if with_state:
        leaves["S"] = normal(n, H, dv, dk)
        if rule in PENALISED:
            x = normal(n, H, dk, dk) / dk**0.5
            leaves["A"] = (x @ x.mT + 0.1 * torch.eye(dk, dtype=torch.float64)) / scale
        if readout == "normalized":
            leaves["z"] = 3 * torch.rand(n, H, dk, generator=gen, dtype=torch.float64)
    options["readout"] = readout
    return {name: None if x is None else x.to(dtype) for name, x in leaves.items()}, options


def run(leaves, options, loss_seed=1, backward=True, **more):
    """Output, final state and the gradient of every leaf under a fixed random loss on o and the final state."""
    leaves = {name: None if x is None else x.detach().clone().requires_grad_(backward) for name, x in leaves.items()}
    state = None if leaves["S"] is None else State(leaves["S"], leaves["A"], leaves["z"])
    tensors = {name: leaves[name] for name in ("q", "k", "v", "u", "penalty", "beta", "g")}
    output = vla(**tensors, initial_state=state, output_final_state=True, **options, **more)
    final = output.final_state
    results = {"o": output.o, "S_T": final.S, "A_T": final.A, "z_T": final.z}
    results = {name: x for name, x in results.items() if x is not None}
    if backward:
        gen = torch.Generator().manual_seed(loss_seed)
        weights = {name: torch.randn(x.shape, generator=gen, dtype=torch.float64) for name, x in results.items()}
        sum((x.double() * weights[name].to(x.device)).sum() for name, x in results.items()).backward()
        results |= {"d" + name: x.grad for name, x in leaves.items() if x is not None and x.grad is not None}
    return {name: x.detach() for name, x in results.items()}


def relative_errors(results, truth):
    """max|x - y| / max|y| for each tensor; both must hold the same names and shapes.

    Where the truth vanishes by cancellation (a head norm of one token's S q does not depend on q's length, the first
    decay meets S = 0) there is nothing to be relative to: sizes under 0.01 count as 0.01.
    """
    assert results.keys() == truth.keys()
    errors = {}
    for name, y in truth.items():
        x, y = results[name].double().cpu(), y.double().cpu()
        assert x.shape == y.shape, name
        assert torch.isfinite(y).all(), f"{name} of the truth is not finite"
        errors[name] = ((x - y).abs().max() / y.abs().max().clamp(min=0.01)).item()
    return errors


def assert_close(results, truth, bound):
    """Every tensor within `bound`, relative to its largest entry (NaN fails)."""
    errors = relative_errors(results, truth)
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= bound}
    assert not wrong, f"off by more than {bound:.0e}: {wrong}"
