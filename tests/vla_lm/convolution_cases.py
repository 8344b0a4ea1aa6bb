"""Cases for the fused short convolution, against its definition in float64; run as a script it prints errors as JSON.

The script is for CPUs, with TRITON_INTERPRET=1 from the start: in a test session Triton may have been imported already.
"""

import json
import sys
import warnings

import torch
from torch.nn import functional as F

from kernels.faulty_kinds import FAULTY
from vla_lm.convolution import ShortConvolution, fused
from vla_lm.state import Packing

# name: (rows, tokens a row, channels, width, document boundaries, with a tail)
CASES = {
    "dense": (2, 37, 130, 4, None, False),
    "dense, tail": (2, 37, 5, 4, None, True),
    "packed": (2, 40, 130, 4, (0, 1, 3, 7, 40, 41, 80), False),
    "packed, tail": (2, 40, 130, 4, (0, 1, 3, 7, 40, 41, 80), True),
    "one token, tail": (3, 1, 16, 4, None, True),
    "two tokens, tail": (2, 2, 16, 4, None, True),
    "width 1": (1, 5, 16, 1, None, False),
    "width 1, packed, tail": (2, 20, 16, 1, (0, 3, 20, 40), True),
    "width 1, packed": (2, 20, 16, 1, (0, 3, 20, 40), False),
    "width 2, tail": (1, 70, 16, 2, (0, 33, 70), True),
    "width 7, packed, tail": (1, 70, 16, 7, (0, 2, 5, 64, 70), True),
}


def definition(x, weight, tail, bounds):
    """y and the new tail, document by document, token by token in the window."""
    width, outputs, tails = weight.shape[1], [], []
    for n, (a, b) in enumerate(zip(bounds, bounds[1:])):
        line = torch.cat((tail[n], x[a:b]))
        outputs.append(sum(weight[:, j] * line[width - 1 - j: width - 1 - j + b - a] for j in range(width)))
        tails.append(line[b - a:])
    return F.silu(torch.cat(outputs)), torch.stack(tails)


def errors(name, device="cpu", dtype=torch.float32):
    """Relative errors of y, the new tail and all gradients."""
    rows, length, channels, width, bounds, with_tail = CASES[name]
    generator = torch.Generator().manual_seed(0)
    edges = bounds or tuple(range(0, rows * length + 1, length))
    documents = len(edges) - 1

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    leaves = {"x": draw(rows * length, channels), "weight": draw(channels, width).float(),
              "tail": draw(documents, width - 1, channels)}
    dy, dtail = draw(rows * length, channels), draw(documents, width - 1, channels)
    if not with_tail:
        leaves["tail"].zero_()

    def finish(leaves, y, tail):
        loss = (y.double() * dy.double()).sum() + (tail.double() * dtail.double()).sum()
        wanted = {k: x for k, x in leaves.items() if x.numel() and (with_tail or k != "tail")}
        gradients = torch.autograd.grad(loss, list(wanted.values()))
        return {"y": y, "tail": tail} | {"d" + k: g for k, g in zip(wanted, gradients)}

    wide = {k: x.double().requires_grad_() for k, x in leaves.items()}
    truth = finish(wide, *definition(*wide.values(), edges))
    leaves = {k: x.requires_grad_() for k, x in leaves.items()}
    module = ShortConvolution(channels, width).to(device)
    module.weight = torch.nn.Parameter(leaves["weight"].detach())
    leaves["weight"] = module.weight
    packing = None if bounds is None else Packing.build(torch.tensor(bounds), rows, length, torch.device(device))
    x = leaves["x"].view(1, -1, channels) if bounds else leaves["x"].view(rows, length, channels)
    assert fused.takes(x.dtype, width, channels, bounds is not None, with_tail, x.device)
    y, tail = module(x, packing, leaves["tail"] if with_tail else None)
    found = finish(leaves, y.flatten(0, 1), tail)
    return {k: float((x.detach().double() - truth[k]).norm() / truth[k].norm().clamp(min=1e-9))
            for k, x in found.items() if x.numel()}


def compiled():
    """Largest difference from the compiled form, of y and the gradient."""
    module = ShortConvolution(16, 4)
    x = torch.randn(2, 9, 16, requires_grad=True)

    def run(function):
        y = function(x, return_tail=False)[0]
        return [y, *torch.autograd.grad(y.square().sum(), [x, module.weight])]

    pairs = zip(run(torch.compile(module, backend="aot_eager", fullgraph=True)), run(module))
    return max((a - b).abs().max().item() for a, b in pairs)


class Wrong:
    """A kernel followed by a fault: `spoil` is given the kernel's arguments."""

    def __init__(self, kernel, spoil):
        self.kernel, self.spoil = kernel, spoil

    def __getitem__(self, grid):
        return lambda *x, **y: (self.kernel[grid](*x, **y), self.spoil(x))


# name: (kernel, what goes wrong, whether a tail and documents are given)
FAULTS = {
    "does not compile": ("convolve_kernel", None, False),
    "y": ("convolve_kernel", lambda x: x[5].zero_(), False),
    "y of the dense form alone": ("convolve_kernel", lambda x: x[4] is None and x[5].fill_(7), False),
    "y with a tail": ("convolve_kernel", lambda x: x[2] is not None and x[5].fill_(7), True),
    "NaN in dweight": ("before_silu_kernel", lambda x: x[7].fill_(torch.nan), False),
    "NaN in dx": ("input_gradient_kernel", lambda x: x[4].fill_(torch.nan), False),
}


def failing():
    """Of each fault what is said, and whether y and the gradients are PyTorch's afterwards."""
    found = {}
    for name, (kernel, spoil, tailed) in FAULTS.items():
        right = getattr(fused, kernel)
        setattr(fused, kernel, Wrong(None if spoil is None else right, spoil))
        fused._checked.clear()
        module, x = ShortConvolution(16, 4), torch.randn(1, 5, 16, requires_grad=True)
        tail = torch.randn(1, 3, 16) if tailed else None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            y, _ = module(x, None, tail)
        plain = module._plain(x, None, tail)
        ours, theirs = ([z, *torch.autograd.grad(z.square().sum(), [x, module.weight])] for z in (y, plain))
        same = all(torch.equal(a, b) for a, b in zip(ours, theirs))
        found[name] = [str(said[0].message) if said else "nothing", same, len(FAULTY)]
        setattr(fused, kernel, right)
        fused._checked.clear()
        FAULTY.clear()
    return found


def empty():
    """Gradients of no tokens after a tail, by the kernels and by PyTorch: as many numbers as inputs, all 0."""
    module, found = ShortConvolution(16, 4), []
    for way in (module.forward, lambda *x: (module._plain(*x), module._tail(*x))):
        x, tail = torch.randn(2, 0, 16, requires_grad=True), torch.randn(2, 3, 16, requires_grad=True)
        y, after = way(x, None, tail)
        (y.sum() + after.sum()).backward()
        found += [list(y.shape), torch.equal(after, tail), float(tail.grad.sum())]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: errors(name) for name in CASES} | {"compiled": compiled(), "failing": failing(), "empty": empty()}
    json.dump(found, sys.stdout)
