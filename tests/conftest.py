"""Before torch is imported: OpenMP threads spin but briefly, as in the recipes. Ctrl-C reaches what tests start."""

import signal
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

import recipes  # noqa: F401 - before torch

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # behind nohup or &: processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def much_gpu_memory():
    """Tests that fill a GPU do so one after another, in however many processes (-n) tests run, and give it back."""
    with FileLock(Path(tempfile.gettempdir()) / "vla-lm-tests-gpu-memory.lock"):
        yield
        import torch

        torch.cuda.empty_cache()
