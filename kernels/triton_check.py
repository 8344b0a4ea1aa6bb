"""Which calls go to the Triton kernels by themselves: those they take, after a comparison with the PyTorch path.

Some Triton versions miscompile some kernels on some GPUs, silently (flash-linear-attention issues 640, 826, 983). So
the first call of each combination of sizes, dtype and rule is preceded by a small one, forward and backward, checked
against the chunked path. A combination that fails is named in a warning and left to the chunked path from then on.
"""

import warnings
from dataclasses import replace

import torch
import triton

from kernels.chunked import chunked
from kernels.triton_backend import run, unsupported

TOKENS = 130  # two whole chunks and a piece of one
BOUNDS = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # tf32 and bf16 rounding stay well below
_verdicts: dict[tuple, bool] = {}


def trusted(call) -> bool:
    """Whether the Triton kernels take this validated `arguments.Call` and were found right on its kind."""
    if unsupported(call) is not None:
        return False
    key = (call.q.device, call.q.dtype, call.q.shape[-1], call.v.shape[-1], call.write_rule, call.erase_key,
           call.feature_map, call.readout, call.u is None, call.beta is None, call.g is None,
           torch.get_float32_matmul_precision())
    if torch.compiler.is_compiling() and key not in _verdicts:
        return True  # a check cannot run while a graph is traced
    if key not in _verdicts:
        _verdicts[key] = _check(call)
    return _verdicts[key]


def _check(call) -> bool:
    try:
        error = check_error(call)
    except Exception as failure:  # a kernel that does not compile or launch here; the chunked path will do
        error = f"{type(failure).__name__}: {str(failure)[:200]}"
    if isinstance(error, float) and error <= BOUNDS[call.q.dtype]:
        return True
    device = torch.cuda.get_device_name(call.q.device) if call.q.device.type == "cuda" else str(call.q.device)
    warnings.warn(
        f"the Triton kernels failed their check against PyTorch (error {error}) with Triton {triton.__version__} on "
        f"{device}: write rule {call.write_rule!r}, read-out {call.readout!r}, {call.q.dtype}, head sizes "
        f"{call.q.shape[-1]} and {call.v.shape[-1]}. Backend 'chunked' is used for these instead.", stacklevel=3)
    return False


def check_error(call) -> float:
    """Largest relative error (Frobenius) of outputs and gradients of a small call of the same kind."""
    rows, heads, (dk, dv), device = 1, call.q.shape[2], (call.q.shape[-1], call.v.shape[-1]), call.q.device
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    inputs = {name: draw(rows, TOKENS, heads, dv if name == "v" else dk).to(call.q.dtype) for name in "qkvu"}
    if call.erase_key == "raw":  # the memory blows up under keys longer than 1: make φ(k) short
        inputs["k"] = inputs["k"] * 0.05 - (3 if call.feature_map == "elu1" else 0)
    inputs["beta"], inputs["g"] = (draw(rows, TOKENS, heads).sigmoid(), -0.1 * draw(rows, TOKENS, heads).abs())
    inputs = {name: x for name, x in inputs.items() if getattr(call, name) is not None}
    penalty = torch.full((heads,), 1.0, dtype=torch.float64, device=device)
    results, weights = [], None
    with torch.enable_grad(), torch.inference_mode(False):
        for backend, dtype in ((run, None), (chunked, torch.float64)):
            leaves = {name: x.detach().clone().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
            fields = {"u": None, "beta": None, "g": None, "penalty": penalty, **leaves}
            output = backend(replace(call, **fields, initial_state=None, output_final_state=True, bounds=None,
                                     diagnostics=False))
            if weights is None:
                weights = draw(*output.o.shape), draw(*output.final_state.S.shape)
            loss = (output.o.double() * weights[0]).sum() + (output.final_state.S.double() * weights[1]).sum()
            results.append([output.o, output.final_state.S, *torch.autograd.grad(loss, list(leaves.values()),
                                                                                 allow_unused=True)])
    pairs = [(x.double(), y.double()) for x, y in zip(*results) if x is not None and y is not None]
    if not all(bool(torch.isfinite(x).all()) for x, _ in pairs):
        return float("inf")
    return max(float((x - y).norm() / y.norm().clamp(min=1e-6)) for x, y in pairs)
