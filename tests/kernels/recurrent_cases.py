"""Cases for the fused recurrent kernel, against the token loop in float64; run as a script it prints errors as JSON.

The script is for CPUs, in a process of its own: see `triton_cases.py`.
"""

import json
import sys
import warnings

import torch
from kernel_cases import VARIANTS, make_inputs, relative_errors, run

from kernels import State, vla, vla_step
from kernels.arguments import check
from kernels.triton_recurrent import run_step, step_error

# name: (variant, readout, (B, T, H, Dk, Dv), with_state, cu_seqlens)
CPU_CASES = {f"{variant}": (variant, "normalized" if i % 2 else "headwise", (1, 9, 2, 16, 16), False, None)
             for i, variant in enumerate(VARIANTS)}
CPU_CASES |= {
    "sizes 32 and 16, state": ("unit", "headwise", (2, 12, 1, 32, 16), True, None),
    "values in two blocks, state": ("unit", "normalized", (1, 6, 2, 16, 128), True, None),
    "packed, state": ("unit", "headwise", (1, 20, 2, 16, 16), True, (0, 1, 4, 15, 20)),
    "packed, normalized": ("gain-key", "normalized", (1, 16, 1, 16, 16), True, (0, 7, 8, 16)),
    "one token, state": ("unit", "normalized", (2, 1, 2, 16, 16), True, None),
    "mesa, state": ("mesa", "normalized", (1, 12, 1, 16, 16), True, None),
    "fixed, state": ("fixed", "normalized", (1, 12, 1, 16, 32), True, None),
    "linear, state": ("linear", "headwise", (1, 12, 1, 16, 16), True, None),
    "40 tokens": ("unit-key", "headwise", (1, 40, 1, 16, 16), False, None),
}


def errors(name, cases, dtype=torch.float32, device="cpu"):
    """Relative error of every output and state of a case."""
    variant, readout, (B, T, H, dk, dv), with_state, bounds = cases[name]
    sequences = None if bounds is None else len(bounds) - 1
    leaves, options = make_inputs(variant, readout, B, T, H, dk, dv, sequences=sequences, with_state=with_state)
    kept = {"S", "A", "z", "penalty"}
    leaves = {key: None if x is None else x.to(device, torch.float32 if key in kept else dtype)
              for key, x in leaves.items()}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds, device=device)
    wide = {key: None if x is None else x.double() for key, x in leaves.items()}
    truth = run(wide, options, backward=False, backend="chunked" if T > 40 else "reference")
    return relative_errors(run(leaves, options, backward=False, backend="recurrent"), truth)


def call_of(leaves, state=None, **options):
    """A validated call of one token."""
    named = dict(beta=None, g=None, write_rule="unit", erase_key="unit", feature_map="elu1", readout="normalized",
                 u_scale="unit", refresh=None, output_final_state=True, cu_seqlens=None, chunk_size=1,
                 diagnostics=False, penalty=0.1)
    return check(*(leaves[name] for name in "qkvu"), **named | options, initial_state=state)


def decoding(tokens=12, past=20, rank=2, device="cpu", d=16):
    """Decoding from a float32 prefill of low-rank directions, by the kernel, against `vla_step` in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    x = {name: draw(1, past + tokens, 2, d) for name in "qkv"}
    x["u"] = draw(1, past + tokens, 2, rank) @ draw(rank, d)
    x = {name: y.to(device) for name, y in x.items()}
    options = dict(readout="headwise")
    with torch.no_grad():
        state = vla(*(x[name][:, :past] for name in "qkvu"), output_final_state=True, **options).final_state
        wide = State(state.S.double(), state.full_penalty_inverse())
        worst = {}
        for t in range(past, past + tokens):
            now = {name: y[:, t:t + 1] for name, y in x.items()}
            out = run_step(call_of(now, state, **options))
            truth = vla_step(*(now[name].double() for name in "qkvu"), wide, **options)
            state, wide = out.final_state, truth.final_state
            assert (state.S.dtype, state.A.dtype, state.A_rest) == (torch.float32, torch.float64, None)
            assert torch.equal(state.A, state.A.mT)
            pairs = {"o": (out.o, truth.o), "S": (state.S, wide.S), "A": (state.A, wide.A)}
            for name, error in relative_errors({n: a for n, (a, _) in pairs.items()},
                                               {n: b for n, (_, b) in pairs.items()}).items():
                worst[name] = max(worst.get(name, 0), error)
    return worst


def compiled():
    """Largest difference between the operator and its compiled form."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 6, 1, 16, generator=generator) for _ in range(4)]

    def plain(*inputs):
        return vla(*inputs, readout="headwise", backend="recurrent").o

    with torch.no_grad():
        wrapped = torch.compile(plain, backend="aot_eager", fullgraph=True)(*inputs)
        return (wrapped - plain(*inputs)).abs().max().item()


def self_check():
    """The check that precedes automatic use in `vla_step`, for two rules."""
    q = torch.randn(1, 1, 1, 16)
    leaves = dict(q=q, k=q, v=q, u=q)
    return max(step_error(call_of(leaves, readout="headwise", g=-q[..., 0].abs(), beta=q[..., 0])),
               step_error(call_of(leaves | {"u": None}, write_rule="gain")))


def gradient_refusal():
    q = torch.randn(1, 1, 1, 16, requires_grad=True)
    try:
        vla(q, q, q, backend="recurrent")
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {name: errors(name, CPU_CASES) for name in CPU_CASES}
    found["bfloat16"] = errors("unit", CPU_CASES, torch.bfloat16)
    found["float16"] = errors("gain-key", CPU_CASES, torch.float16)
    found["decoding"] = decoding()
    found["gradient"] = gradient_refusal()
    found["compiled"] = compiled()
    found["self-check"] = self_check()
    json.dump(found, sys.stdout)
