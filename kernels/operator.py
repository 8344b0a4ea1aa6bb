"""The one public face of the kernels: raw q, k, v, u in, o out. Notation as in the README of this folder."""

import torch
from torch import Tensor

from kernels.arguments import check
from kernels.chunked import chunked
from kernels.reference import reference
from kernels.state import Output, State
from kernels.step import step

try:
    from kernels.triton_backend import run as triton
    from kernels.triton_check import faulty
    from kernels.triton_common import unsupported
except ImportError:  # no Triton on this platform
    def triton(call) -> Output:
        raise ValueError("backend 'triton' needs the package triton, which is not installed here; "
                         "install it (Linux, x86-64), or use backend='chunked'")

    def faulty(call) -> bool:
        return False

    def unsupported(call) -> str:
        return "nothing here"

try:
    from kernels.triton_recurrent import run as recurrent
    from kernels.triton_recurrent import run_step, takes_step
except ImportError:
    def recurrent(call) -> Output:
        raise ValueError("backend 'recurrent' needs the package triton, which is not installed here; "
                         "install it (Linux, x86-64), or use backend='chunked'")

    run_step = step

    def takes_step(call) -> bool:
        return False

# A backend is a function from a validated `arguments.Call` to an `Output`.
BACKENDS = {"reference": reference, "chunked": chunked, "triton": triton, "recurrent": recurrent}


def vla(q: Tensor, k: Tensor, v: Tensor, u: Tensor | None = None, *, penalty: float | Tensor = 0.1,
        beta: Tensor | None = None, g: Tensor | None = None, write_rule: str = "unit", erase_key: str = "unit",
        feature_map: str = "elu1", readout: str = "normalized", u_scale: str = "unit",
        refresh: tuple[int, float] | None = None, initial_state: State | None = None,
        output_final_state: bool = False, cu_seqlens: Tensor | None = None, chunk_size: int = 64,
        diagnostics: bool = False, backend: str = "auto") -> Output:
    """Variational linear attention over a stretch of tokens, with a gradient for every floating-point input.

    Args:
        q, k: queries and keys before feature map and normalisation, [B, T, H, Dk].
        v: values, [B, T, H, Dv]. q, k, v and u share one dtype: float32, bfloat16, float16 or float64.
        u: penalty directions before normalisation, [B, T, H, Dk]; None: the unit keys themselves. `mesa` takes no u,
            beta or g, "fixed" and "linear" ignore u.
        penalty: λ0 > 0, a number or a tensor [H]. Values are not looked at while torch.compile traces, nor those of a
            tensor that learns on a GPU.
        beta: write strength, [B, T, H], of any floating-point dtype; None is 1. Ignored by `linear`.
        g: log decay of the memory in nats, likewise, meant to be <= 0; None is 0. Refused with readout "normalized".
            In chunks below -50 counts as -50, and -inf resets.
        write_rule: "unit" (the paper: w = A k̂/‖A k̂‖), "gain" (w = A k̂; with u=None recursive least squares),
            "fixed" (w = k̂: the delta rule), "linear" (w = φ(k), nothing erased: linear attention), "mesa" (the memory
            of "gain" with u=None, read as Σ v k̂ᵀ A_t q: exact MesaNet).
        erase_key: "unit" (k̂) or "raw" (φ(k)); "raw" with "gain" is the paper's unstable version 2.
        feature_map: φ of q and k: "elu1" (elu + 1), "silu" or "identity".
        readout: "normalized" (the paper's eq. 11) or "headwise" (RMS norm of each head, no weight).
        u_scale: "unit", or "inverse_sqrt_d" (u/√Dk, as in the authors' code).
        refresh: (every, amount): after every `every` tokens of the call A += amount·I (authors' code); reference only.
        initial_state: state to go on from (N = B, or one per document); then `penalty` is not used.
        output_final_state: return the state after the last token.
        cu_seqlens: document boundaries [0, …, T], int32 or int64 [N + 1]; B must be 1. State restarts at each.
        chunk_size: spacing of diagnostics, and of "chunked" the tokens worked on at once: speed, not the result.
        diagnostics: return `Diagnostics` as well (costs the eigenvalues of A at each of their places).
        backend: "chunked" (PyTorch), "triton" (CUDA; head sizes 16, 32, 64, 128; not float64; the first call of each
            kind is preceded by a small one compared with "chunked", which takes over with a warning where they
            differ), "recurrent" (the same limits and no gradient; token by token in one launch, for short stretches),
            "reference" (the token loop) or "auto": "reference" with refresh, "triton" where it takes the call on CUDA,
            else "chunked".

    Returns: `Output`; o has the dtype of v, states are float32 (float64 for float64 input).
    Raises: ValueError or TypeError with the value, what was expected and the mend. Whether a state's A is positive
        definite is not looked at by `vla_step` and "reference", nor on a GPU where `vla` gave the state.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; choose one of 'auto', {', '.join(map(repr, BACKENDS))}")
    if refresh is not None and backend not in ("auto", "reference"):
        raise ValueError(f"refresh makes A depend on its own past and is known to backend 'reference' alone, not to "
                         f"{backend!r}; leave refresh out or use backend='reference'")
    call = check(q, k, v, u, penalty=penalty, beta=beta, g=g, write_rule=write_rule, erase_key=erase_key,
                 feature_map=feature_map, readout=readout, u_scale=u_scale, refresh=refresh,
                 initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                 chunk_size=chunk_size, diagnostics=diagnostics)
    with torch.autocast(q.device.type, enabled=False):
        if backend == "auto":
            backend = "triton" if q.is_cuda and unsupported(call) is None else "chunked"
            backend = backend if refresh is None else "reference"
        if backend == "triton" and faulty(call):
            backend = "chunked"
        return BACKENDS[backend](call)


def mesa(q: Tensor, k: Tensor, v: Tensor, **options) -> Output:
    """Exact MesaNet: o_t reads argmin_S Σ ‖v − S k̂‖² + λ0 ‖S‖² at φ(q_t). `vla` with write_rule="mesa"; its options."""
    return vla(q, k, v, write_rule="mesa", **options)


def vla_step(q: Tensor, k: Tensor, v: Tensor, u: Tensor | None = None, state: State | None = None, *,
             penalty: float | Tensor = 0.1, beta: Tensor | None = None, g: Tensor | None = None,
             write_rule: str = "unit", erase_key: str = "unit", feature_map: str = "elu1",
             readout: str = "normalized", u_scale: str = "unit") -> Output:
    """One token of decoding, the same mathematics as `vla`: q, k, u [B, 1, H, Dk] or [B, H, Dk], v likewise with Dv.

    beta, g: [B, 1, H] or [B, H]. state: from `vla`, from the step before, or None to begin.
    Returns an `Output` with o in the shape of v and the new state; its A is float64, because rank-one updates of a
    float32 A are off by 6e-3 after a million tokens. On CUDA without gradient it is one launch of the recurrent kernel,
    where that takes the call. Errors as in `vla`.
    """
    squeeze = isinstance(q, Tensor) and q.dim() == 3
    if squeeze:
        q, k, v, u, beta, g = (x[:, None] if isinstance(x, Tensor) else x for x in (q, k, v, u, beta, g))
    call = check(q, k, v, u, penalty=penalty, beta=beta, g=g, write_rule=write_rule, erase_key=erase_key,
                 feature_map=feature_map, readout=readout, u_scale=u_scale, refresh=None, initial_state=state,
                 output_final_state=True, cu_seqlens=None, chunk_size=1, diagnostics=False)
    if q.shape[1] != 1:
        raise ValueError(f"vla_step takes one token, q has shape {list(q.shape)}; use vla for {q.shape[1]} tokens")
    with torch.autocast(q.device.type, enabled=False):
        output = run_step(call) if takes_step(call) else step(call)
    return Output(output.o[:, 0], output.final_state) if squeeze else output
