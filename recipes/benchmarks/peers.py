"""The operators that VLA is measured beside: softmax attention and flash-linear-attention's.

Each takes the inputs of `contenders.make_inputs` and gives a call that returns the output and the tensors whose gradient
counts; those of flash-linear-attention through `peer`, which imports when it is called.
"""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def sdpa(x):
    inputs = [x[name] for name in "qkv"]
    flash = inputs[0].is_cuda and inputs[0].dtype in (torch.float16, torch.bfloat16)

    def call():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
            return F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in inputs), is_causal=True)
    return call, inputs


def peer(module: str, function: str, use: Callable):
    return lambda x: use(getattr(import_module(f"fla.ops.{module}"), function), x)


def linear(f, x):
    return lambda: f(x["q"], x["unit"], x["v"], normalize=False)[0], [x["q"], x["unit"], x["v"]]


def deltanet(f, x):
    beta = x["beta"].detach().to(x["q"].dtype).requires_grad_()
    return lambda: f(x["q"], x["unit"], x["v"], beta)[0], [x["q"], x["unit"], x["v"], beta]


def gated(f, x):
    inputs = [x[name] for name in ("q", "unit", "v", "g", "beta")]
    return lambda: f(*inputs)[0], inputs


def comba(f, x):
    read = (0.9 * x["unit"].detach()).requires_grad_()
    inputs = [x["q"], x["unit"], x["v"], read, x["g"], x["beta"]]
    return lambda: f(*inputs)[0], inputs


def preconditioned(f, x):
    gate, strength = (x[name].detach().clone().requires_grad_() for name in ("g", "beta"))
    inputs = [x["q"], x["unit"], x["v"], gate, x["g"], strength, x["beta"]]
    return lambda: f(*inputs)[0], inputs


def mesa(iterations: int):
    def use(f, x):
        penalty = torch.full(x["q"].shape[2:], 0.25, device=x["q"].device, requires_grad=True)
        inputs = [x["q"], x["unit"], x["v"], x["g"], x["beta"], penalty]
        return lambda: f(*inputs, max_CG_iteration=iterations)[0], inputs
    return use
