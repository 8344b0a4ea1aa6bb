"""What a number depends on besides code and shape: where it was measured."""

import subprocess
import sys
from functools import lru_cache
from importlib import metadata

import torch


def machine(device: torch.device) -> dict:
    """The card, its driver (None on a CPU), the packages' versions."""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    for package in ("triton", "flash-linear-attention"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    if device.type == "cuda":
        return {"card": torch.cuda.get_device_name(device), "driver": driver_version(), "versions": versions}
    return {"card": f"CPU ({torch.get_num_threads()} threads)", "driver": None, "versions": versions}


@lru_cache
def driver_version() -> str | None:
    """Of NVIDIA's driver, for example 580.159.04, as nvidia-smi says; None where it says nothing."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)  # a line for each GPU
