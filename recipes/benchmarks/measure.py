"""How a call is measured: the median of its time, and the memory it takes beyond what was there."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch.utils.benchmark import Timer

CYCLES = 2e9  # a GPU's in a second
REPEAT = 150  # milliseconds a call is repeated for
SLOW = 1.0  # seconds: on a GPU, a call that takes longer is timed once after the warm-up, not repeatedly


@dataclass(frozen=True)
class Shape:
    """B sequences of T tokens, H heads of D features."""

    B: int
    T: int
    H: int
    D: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From "BxTxHxD", for example 8x4096x16x64. Raises ValueError."""
        try:
            sizes = [int(part) for part in text.split("x")]
            assert len(sizes) == 4 and min(sizes) > 0
        except (ValueError, AssertionError):
            raise ValueError(f"shape {text!r} is not of the form BxTxHxD, for example 8x4096x16x64") from None
        return cls(*sizes)

    def __str__(self) -> str:
        return f"{self.B}x{self.T}x{self.H}x{self.D}"


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto": a GPU where there is one. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device is found here; leave --device out to measure on the CPU")
    return device


def pick_dtype(name: str) -> torch.dtype:
    """The floating-point type called `name`. Raises ValueError."""
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"--dtype is {name!r}; choose bfloat16, float16 or float32")
    return getattr(torch, name)


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of `call` after warm-up: on a GPU CUDA events with a cold L2, elsewhere the host's clock.

    The GPU waits until the host has launched a call, so that only the GPU's work is timed: some operators take longer
    to launch than to run, and a busy host would decide the comparison. A call of more than SLOW is not repeated: its
    number is the one first run after the warm-up, with the host's launches inside (on a GPU that is the token loop in
    Python).
    """
    call()  # compiles and tunes
    if device.type != "cuda":
        return launched_ms(call)
    cache = torch.empty(2**28, dtype=torch.int8, device=device)  # more than L2 holds

    def time(cycles: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(cycles)
        start.record()
        call()
        end.record()
        return start, end

    torch.cuda.synchronize(device)
    begun = perf_counter()
    start, end = time(0)
    launching = perf_counter() - begun
    torch.cuda.synchronize(device)
    if (once := start.elapsed_time(end)) > SLOW * 1e3:
        return once
    events = [time(int(launching * 2 * CYCLES)) for _ in range(max(5, min(100, int(REPEAT / once))))]
    torch.cuda.synchronize(device)
    return median(start.elapsed_time(end) for start, end in events)


def launched_ms(call: Callable[[], object]) -> float:
    """Median milliseconds of `call`, one after the other, with what the host needs to launch it."""
    return Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.1).median * 1e3


def graph_ms(call: Callable[[], object]) -> float:
    """Median milliseconds of `call` in a CUDA graph of many: without launches, and what fits L2 stays there."""
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(call, return_mode="median")


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that `call` takes at its peak beyond what is allocated before it; None where that is not counted."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def reason(error: Exception) -> str:
    """An error's first line, as the reason of a row without numbers."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
