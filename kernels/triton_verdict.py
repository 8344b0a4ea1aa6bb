"""Whether kernels are right here: the one way a comparison before their first use is run, judged and told."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import triton


def found_right(check: Callable[..., float], *args: object, bound: float, device: torch.device, what: str,
                instead: str) -> bool:
    """Whether the relative error check(*args) is at most `bound`; where not, a warning says what is used `instead`.

    Kernels that do not compile or launch here are not right either. A full GPU says nothing about them: memory that
    PyTorch keeps for later is given back and the check made once more; then its error is raised.
    """
    try:
        try:
            error = _apart(check, *args)
        except RuntimeError as failure:
            if not out_of_memory(failure):
                raise
            torch.cuda.empty_cache()  # Triton's own allocations, unlike PyTorch's, do not do it
            error = _apart(check, *args)
    except Exception as failure:  # PyTorch's path will do
        if out_of_memory(failure):
            raise
        error = f"{type(failure).__name__}: {str(failure)[:200]}"
    if isinstance(error, float) and error <= bound:
        return True
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    warnings.warn(f"the Triton kernels failed their check against PyTorch (error {error}) with Triton "
                  f"{triton.__version__} on {name}: {what}. {instead}.", stacklevel=4)
    return False


def out_of_memory(failure: Exception) -> bool:
    """PyTorch's error, or the driver's as Triton passes it on; not a kernel's "out of resource: shared memory"."""
    return isinstance(failure, torch.OutOfMemoryError) or "out of memory" in str(failure)


def _apart(check: Callable[..., float], *args: object) -> float:
    """In a thread of its own: free of the caller's autocast, inference mode and hooks on saved tensors."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(check, *args).result()
