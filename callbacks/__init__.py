"""What watches and guards a run, one concern a file; see README.md."""

from callbacks.checkpoint import RunCheckpoint
from vla_lm.checkpoint_files import newest_complete, read_marker
from callbacks.finite_guard import FiniteGuard, NonFiniteError
from callbacks.gradient_norms import GradientNorms
from callbacks.metrics_log import JsonlLogger, read_metrics
from callbacks.missed_validation import MissedValidation
from callbacks.preemption import REQUEUE, Preempted, Preemption
from callbacks.progress import progress_bar
from callbacks.same_kernels import SameKernels
from callbacks.start_report import StartReport
from callbacks.state_norms import StateNorms
from callbacks.together import CheckpointError
from callbacks.throughput import Throughput

__all__ = [
    "CheckpointError",
    "FiniteGuard",
    "GradientNorms",
    "JsonlLogger",
    "MissedValidation",
    "NonFiniteError",
    "Preempted",
    "Preemption",
    "REQUEUE",
    "RunCheckpoint",
    "SameKernels",
    "StartReport",
    "StateNorms",
    "Throughput",
    "newest_complete",
    "progress_bar",
    "read_marker",
    "read_metrics",
]
