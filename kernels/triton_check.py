"""Before the Triton kernels are used on a kind of call: a comparison with the PyTorch path.

Some Triton versions miscompile some kernels on some GPUs, silently (flash-linear-attention issues 640, 826, 983). So
the first call of each combination of sizes, dtype and rule is preceded by a small one, forward and (where gradients
are on) backward, checked against the chunked path. A combination that fails is named in a warning and left to the
chunked path from then on. The check is the same to the bit on every rank and waits for none.
"""

from dataclasses import replace

import torch

from kernels.chunked import chunked
from kernels.faulty_kinds import FAULTY
from kernels.state import State
from kernels.triton_backend import LONG, SMALL, run, small
from kernels.triton_common import unsupported
from kernels.triton_verdict import found_right

TOKENS = 130  # two whole chunks and a piece of one
BOUNDS = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # tf32 and bf16 rounding stay well below
_checked: set[tuple] = set()


def faulty(call) -> bool:
    """Whether the Triton kernels were found wrong on the kind of this validated `arguments.Call`.

    False for calls that they refuse. While torch.compile traces or a CUDA graph is captured no check can run: then only
    kinds that failed before are faulty.
    """
    if not call.q.is_cuda or unsupported(call) is not None:
        return False
    kind = (call.q.dtype, call.q.shape[-1], call.v.shape[-1], call.write_rule, call.erase_key, call.feature_map,
            call.readout, call.u_scale, call.u is None, call.beta is None, call.g is None)
    if kind in FAULTY or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return kind in FAULTY
    # A past, handed in or long, changes how A is carried where keys are their own directions.
    past = call.initial_state is not None or (call.u is None and call.q.shape[1] > LONG)
    key = (*kind, past, small(call), torch.is_grad_enabled(), call.q.device, torch.get_float32_matmul_precision())
    if key not in _checked:
        if not _check(call, past, torch.is_grad_enabled()):
            FAULTY.add(kind)
        _checked.add(key)
    return kind in FAULTY


def _check(call, past: bool, gradients: bool) -> bool:
    return found_right(
        check_error, call, past, gradients, device=call.q.device,
        bound=BOUNDS[call.q.dtype] * (2 if call.erase_key == "raw" else 1),  # long keys amplify rounding
        what=f"write rule {call.write_rule!r}, read-out {call.readout!r}, {call.q.dtype}, head sizes "
             f"{call.q.shape[-1]} and {call.v.shape[-1]}", instead="Backend 'chunked' is used for these")


def check_error(call, past: bool = False, gradients: bool = True) -> float:
    """Largest relative error (Frobenius) of outputs and gradients of a small call of the same kind.

    past: it begins from a state. Draws from no random generator but its own.
    """
    rows, heads, (dk, dv), device = 1, call.q.shape[2], (call.q.shape[-1], call.v.shape[-1]), call.q.device
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    inputs = {name: draw(rows, TOKENS, heads, dv if name == "v" else dk).to(call.q.dtype) for name in "qkvu"}
    if call.erase_key == "raw":  # the memory blows up under keys longer than 1: make φ(k) short
        inputs["k"] = inputs["k"] * 0.05 - (3 if call.feature_map == "elu1" else 0)
    inputs["beta"], inputs["g"] = (draw(rows, TOKENS, heads).sigmoid(), -0.1 * draw(rows, TOKENS, heads).abs())
    inputs = {name: x for name, x in inputs.items() if getattr(call, name) is not None}
    value = SMALL / 2 if small(call) else 1.0
    penalty = torch.full((heads,), value, dtype=torch.float64, device=device)
    state = State.initial(rows, heads, dk, dv, value, call.write_rule, call.readout, device=device) if past else None
    results, weights = [], None
    with torch.set_grad_enabled(gradients):
        for backend, dtype in ((run, None), (chunked, torch.float64)):
            leaves = {name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for name, x in inputs.items()}
            fields = {"u": None, "beta": None, "g": None, "penalty": penalty, **leaves}
            output = backend(replace(call, **fields, initial_state=state, output_final_state=True, bounds=None,
                                     diagnostics=False))
            results.append([output.o, output.final_state.S])
            if weights is None:
                weights = [draw(*x.shape) for x in results[0]]
            if gradients:
                loss = sum((x.double() * weight).sum() for x, weight in zip(results[-1], weights))
                results[-1] += torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = [(x.detach().double(), y.detach().double()) for x, y in zip(*results) if x is not None and y is not None]
    if not all(bool(torch.isfinite(x).all()) for x, _ in pairs):
        return float("inf")
    return max(float((x - y).norm() / y.norm().clamp(min=1e-6)) for x, y in pairs)
