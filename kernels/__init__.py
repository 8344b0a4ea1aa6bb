"""Variational linear attention as one operator; knows nothing of models. See README.md in this folder."""

from kernels.delta_rule import delta_rule
from kernels.operator import mesa, vla, vla_step
from kernels.state import Diagnostics, Output, State

__all__ = ["Diagnostics", "Output", "State", "delta_rule", "mesa", "vla", "vla_step"]
