"""Cases for the Triton kernels, against the chunked path in float64; run as a script it prints their errors as JSON.

The script is for CPUs: Triton's interpreter must be chosen (TRITON_INTERPRET=1) before Triton is first imported, which
in a test session may have happened already, so `test_triton.py` starts it as a process of its own.
"""

import json
import math
import sys
import tempfile
import time
from dataclasses import fields

import torch
from kernel_cases import make_inputs, relative_errors, run
from torch.utils.checkpoint import checkpoint

from kernels import vla

# name: (variant, readout, (B, T, H, Dk, Dv), with_state, cu_seqlens)
CPU_CASES = {
    "unit, normalized": ("unit", "normalized", (1, 80, 1, 16, 16), False, None),
    "unit, headwise, state": ("unit", "headwise", (1, 69, 2, 32, 16), True, None),
    "unit key, scaled": ("unit-scaled", "headwise", (1, 40, 1, 16, 16), False, None),
    "unit, packed, state": ("unit", "headwise", (1, 80, 1, 16, 16), True, (0, 3, 70, 71, 80)),
    "gain": ("gain", "headwise", (2, 33, 1, 16, 16), False, None),
    "gain key, state": ("gain-key", "normalized", (1, 66, 1, 16, 16), True, None),
    "gain raw": ("gain-raw", "headwise", (1, 20, 1, 16, 16), False, None),
    "fixed": ("fixed", "normalized", (1, 66, 1, 16, 32), True, None),
    "fixed raw": ("fixed-raw", "headwise", (1, 20, 1, 16, 16), False, None),
    "linear": ("linear", "headwise", (1, 70, 1, 16, 16), True, None),
    "linear, normalized, packed": ("linear", "normalized", (1, 80, 1, 16, 16), True, (0, 1, 64, 80)),
    "mesa, state": ("mesa", "normalized", (1, 66, 1, 16, 16), True, None),
    "one token": ("unit", "normalized", (1, 1, 1, 16, 16), True, None),
}

# Those that compute otherwise where PyTorch allows tf32: A in float32, directions as 16 bit integers.
TF32_CASES = ("unit, headwise, state", "unit, packed, state", "unit key, scaled", "gain", "gain raw")
DIAGNOSED = (("unit", True), ("gain-key", False), ("fixed", False), ("linear", False))  # variant, packed


def errors(name, cases, dtype=torch.float32, device="cpu"):
    """Relative error of every output, state and gradient of a case, and of nothing else."""
    variant, readout, (B, T, H, dk, dv), with_state, bounds = cases[name]
    sequences = None if bounds is None else len(bounds) - 1
    leaves, options = make_inputs(variant, readout, B, T, H, dk, dv, sequences=sequences, with_state=with_state)
    kept = {"S", "A", "z", "penalty"}
    leaves = {key: None if x is None else x.to(device, torch.float32 if key in kept else dtype)
              for key, x in leaves.items()}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds, device=device)
    wide = {key: None if x is None else x.double() for key, x in leaves.items()}
    truth, results = run(wide, options, backend="chunked"), run(leaves, options, backend="triton")
    for x in (truth, results):
        if "dA" in x:  # A is symmetric: only the symmetric part of its gradient has a meaning
            x["dA"] = (x["dA"] + x["dA"].mT) / 2
    return relative_errors(results, truth)


def diagnostics_errors(variant, packed, dtype=torch.float32, device="cpu"):
    """Relative error of every diagnostic at ends of chunks of 128, which come from the kernels' own pass."""
    bounds = torch.tensor([0, 3, 140, 200], device=device) if packed else None
    leaves, options = make_inputs(variant, "headwise", 1 if packed else 2, 200, 1, 16, 16,
                                  sequences=3 if packed else None)
    tensors = {key: None if leaves[key] is None
               else leaves[key].to(device, torch.float32 if key == "penalty" else dtype)
               for key in ("q", "k", "v", "u", "penalty", "beta", "g")}
    found = []
    for backend in ("triton", "chunked"):
        wide = {key: x if x is None or backend == "triton" else x.double() for key, x in tensors.items()}
        x = vla(**wide, diagnostics=True, chunk_size=128, cu_seqlens=bounds, backend=backend, **options).diagnostics
        found.append({f.name: getattr(x, f.name) for f in fields(x)})
    assert torch.equal(found[0].pop("chunk_ends"), found[1].pop("chunk_ends"))
    assert [x is None for x in found[0].values()] == [x is None for x in found[1].values()]
    return {name: float((x - found[1][name]).norm() / found[1][name].norm().clamp(min=1e-6))
            for name, x in found[0].items() if x is not None}


def extremes(device="cpu"):
    """Relative errors of o and, for a small λ0, of the gradients, where float32 leaves least; o itself for β = 0."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 80, 1, 16, generator=generator).to(device) for _ in range(4)]
    decay = torch.full((1, 80, 1), -0.01, device=device)
    decay[:, ::5] = -math.inf

    def both(inputs, **options):
        found = []
        for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
            leaves = [y.detach().to(dtype, copy=True).requires_grad_() for y in inputs]
            options = {name: y.to(dtype) if isinstance(y, torch.Tensor) else y for name, y in options.items()}
            o = vla(*leaves, readout="headwise", backend=backend, **options).o
            found.append([o, *torch.autograd.grad((o * torch.linspace(-1, 1, 16, device=device)).sum(), leaves)])
        return [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in zip(*found)]

    repeated = [y[:, :1].expand_as(y) for y in x[1:2]]
    found = {f"{name}, λ0 = 1e-4": error for name, error in zip(("o", "dq", "dk", "dv", "du"), both(x, penalty=1e-4))}
    found["one direction"] = both([x[0], *repeated, x[2], *repeated], feature_map="identity")[0]
    found["reset by -inf"] = both(x, g=decay)[0]
    found["beta 0"] = vla(*x, beta=0 * decay.exp(), readout="headwise", backend="triton").o.abs().max().item()
    return found


def against_plain(wrap):
    """Largest differences of output and gradients between the operator and `wrap` of it."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 20, 1, 16, generator=generator, requires_grad=True) for _ in range(4)]

    def plain(*inputs):
        return vla(*inputs, readout="headwise", backend="triton").o

    o, other = plain(*inputs), wrap(plain)(*inputs)
    pairs = zip(torch.autograd.grad(o.sum(), inputs), torch.autograd.grad(other.sum(), inputs))
    with torch.no_grad():  # leaves out what only a backward pass reads
        alone = wrap(plain)(*inputs)
    return {"o": (o - other).abs().max().item(), "gradients": max((x - y).abs().max().item() for x, y in pairs),
            "o without gradient": (o - alone).abs().max().item()}


def data_parallel():
    """Largest difference of the gradients of two ranks under DDP, each with one of two rows, from one process's."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder,), nprocs=2)
        found, truth = torch.load(f"{folder}/0"), _gradients(_Projected(), torch.arange(2))
    return max((x - y).abs().max().item() for x, y in zip(found, truth, strict=True))


class _Projected(torch.nn.Module):
    """The operator behind a projection, all weights from one seed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(8, 64)

    def forward(self, x):
        q, k, v, u = self.project(x).unflatten(-1, (4, 1, 16)).unbind(2)
        return vla(q, k, v, u, readout="headwise", backend="triton").o


def _gradients(model, rows):
    x = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(1))
    (model(x[rows]) * torch.linspace(-1, 1, 16)).mean().backward()
    return [p.grad for p in model.parameters()]


def _rank(rank, folder):
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    gradients = _gradients(torch.nn.parallel.DistributedDataParallel(_Projected()), torch.tensor([rank]))
    torch.save(gradients, f"{folder}/{rank}")
    store.add("done", 1)
    while store.add("done", 0) < 2:  # gloo aborts a process that still sends to one that has gone
        time.sleep(0.01)
    torch.distributed.destroy_process_group()


def self_check():
    """The check that precedes automatic use."""
    from kernels.arguments import check
    from kernels.triton_check import check_error

    q = torch.randn(1, 2, 1, 16)
    return check_error(check(q, q, q, q, penalty=0.1, beta=q[..., 0], g=-q[..., 0].abs(), write_rule="unit",
                             erase_key="unit", feature_map="elu1", readout="headwise", u_scale="unit", refresh=None,
                             initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=64,
                             diagnostics=False))


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: errors(name, CPU_CASES) for name in CPU_CASES}
    torch.set_float32_matmul_precision("high")
    found |= {name + ", tf32": errors(name, CPU_CASES) for name in TF32_CASES}
    x = [torch.randn(1, 80, 1, 16) for _ in range(4)]
    x[3][0, 20, 0, 5] = math.nan
    found["nan"] = {"finite": vla(*x, readout="headwise", backend="triton").o[0, 20:].isfinite().sum().item()}
    torch.set_float32_matmul_precision("highest")
    found["extremes"] = extremes()
    found["bfloat16"] = errors("unit, headwise, state", CPU_CASES, torch.bfloat16)
    found |= {f"diagnostics of {variant}": diagnostics_errors(variant, packed) for variant, packed in DIAGNOSED}
    found["compiled"] = against_plain(lambda f: torch.compile(f, backend="aot_eager", fullgraph=True))
    found["checkpointed"] = against_plain(lambda f: lambda *inputs: checkpoint(f, *inputs, use_reentrant=False))
    found["data parallel"] = {"gradients": data_parallel()}
    found["self-check"] = {"error": self_check()}
    json.dump(found, sys.stdout)
