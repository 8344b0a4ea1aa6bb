"""Triton's interpreter, which must be chosen before Triton is imported: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def found_by(script: Path) -> Any:
    """What a script of cases prints, as JSON, where kernels run in Python on the CPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run([sys.executable, "-W", "ignore", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
