"""The operators that VLA is measured beside: softmax attention and flash-linear-attention's.

Each takes the inputs of `contenders.make_inputs` and gives a call that returns the output and the tensors whose
gradient counts; those of flash-linear-attention through `peer`, which imports when it is called. Their arguments stand
in the order of flash-linear-attention's own signatures (`fla.ops`, version 0.6.0). Numbers that its layers learn are
constants here: they do not change what is computed, only its values.
"""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DECAY = 0.9  # Comba's: of the key that is read before a write
PENALTY = 0.25  # MesaNet's λ; the lower bound that its layer sets


def sdpa(x):
    """Causal softmax attention of raw q, k, v; flash, or an error, in half precision on CUDA."""
    inputs = [x[name] for name in "qkv"]
    flash = inputs[0].is_cuda and inputs[0].dtype in (torch.float16, torch.bfloat16)

    def call():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
            return F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in inputs), is_causal=True)
    return call, inputs


def peer(module: str, function: str, use: Callable):
    """`use` with fla.ops.<module>.<function>. Calling it raises ImportError where flash-linear-attention is missing."""
    return lambda x: use(getattr(import_module(f"fla.ops.{module}"), function), x)


def linear(f, x):
    """q, k, v; without the division by the sum of the weights."""
    return lambda: f(x["q"], x["unit"], x["v"], normalize=False)[0], [x["q"], x["unit"], x["v"]]


def deltanet(f, x):
    """q, k, v, beta: the strength of a write, in q's type."""
    beta = x["beta"].detach().to(x["q"].dtype).requires_grad_()
    return lambda: f(x["q"], x["unit"], x["v"], beta)[0], [x["q"], x["unit"], x["v"], beta]


def gated(f, x):
    """q, k, v, g: the logarithm of the decay, beta."""
    inputs = [x[name] for name in ("q", "unit", "v", "g", "beta")]
    return lambda: f(*inputs)[0], inputs


def comba(f, x):
    """q, k, v, p: the key that is read before a write, g, beta.

    The layer's p is k times a number in (0, 1) that each head learns; DECAY stands for it.
    """
    read = (DECAY * x["unit"].detach()).requires_grad_()
    inputs = [x["q"], x["unit"], x["v"], read, x["g"], x["beta"]]
    return lambda: f(*inputs)[0], inputs


def preconditioned(f, x):
    """q, k, v, g and beta of the preconditioner interleaved with those of the memory: g_atk, g, beta_atk, beta.

    Normalises q and k once more, as it does unless told otherwise.
    """
    gate, strength = (x[name].detach().clone().requires_grad_() for name in ("g", "beta"))
    inputs = [x["q"], x["unit"], x["v"], gate, x["g"], strength, x["beta"]]
    return lambda: f(*inputs)[0], inputs


def mesa(iterations: int):
    """q, k, v, g, beta, lamb: the penalty of every key feature, [H, D]; the layer's is learned and PENALTY at least.

    iterations: of the conjugate gradients, always all of them.
    """
    def use(f, x):
        penalty = torch.full(x["q"].shape[2:], PENALTY, device=x["q"].device, requires_grad=True)
        inputs = [x["q"], x["unit"], x["v"], x["g"], x["beta"], penalty]
        return lambda: f(*inputs, max_CG_iteration=iterations)[0], inputs
    return use
