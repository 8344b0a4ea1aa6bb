"""What a run will need of a rank's memory, before it is taken, and what its numbers really are, once they are there."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from callbacks.allocated import allocated, communicated
from callbacks.gradients import at_step_boundary

STEPS = 2  # the second step is the first whose backward pass has optimizer states beside it


class StartReport(Callback):
    """Says on rank 0, in ``start.txt`` of the run's folder and as text in TensorBoard, of this rank's memory:

    - before anything is allocated, the plan: bytes and types of parameters, masters, gradients, optimizer states,
      buckets, activations and carried states; with a warning that names the largest part and the mend where the device
      has less free memory;
    - before the first step, the types of parameters, masters, gradient sums and recurrent states as they are;
    - after two steps, bytes and types of all of them as they are, beside the plan, and the device's peak.

    Args:
        folder: the run's folder; None: nothing is written there.

    Reads ``pl_module.memory_plan()`` (a plan: ``bytes(part)``, ``device_bytes``, ``largest``, ``mend()``, ``str``) and
    ``pl_module.state_dtypes()`` ({name: dtype}); where a model has neither, the plan and the states are left out.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.plan: Any = None
        self._lines: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not hasattr(pl_module, "memory_plan"):
            return
        try:
            self.plan = pl_module.memory_plan()
        except ValueError as error:
            self._say(trainer, f"no estimate of the memory that a rank needs: {error}")
            return
        self._say(trainer, f"memory that each of {trainer.world_size} ranks will need, an estimate:\n{self.plan}")
        device = trainer.strategy.root_device
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            if free < self.plan.device_bytes:
                need, largest = self.plan.device_bytes, self.plan.largest
                rank_zero_warn(f"{device} has {free / 1e9:.1f} GB free and a rank is estimated to need "
                               f"{need / 1e9:.1f} GB, most of it {largest.name} ({largest.bytes / 1e9:.1f} GB): "
                               f"{self.plan.mend()}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first, self._gradients = trainer.global_step, None
        real = allocated(trainer, pl_module)
        states: dict[str, torch.dtype] = {}
        if hasattr(pl_module, "state_dtypes"):
            with trainer.precision_plugin.val_step_context():
                states = pl_module.state_dtypes()
        found = {
            "parameters": _types(real["parameters"]),
            "masters": _types(real["masters"]) or "(the parameters themselves)",
            "gradients' sums over ranks": _types(communicated(trainer, pl_module)) or "(one rank)",
            "recurrent states": ", ".join(f"{name} {_types([dtype])}" for name, dtype in states.items()) or "none",
            "precision": trainer.precision,
        }
        self._say(trainer, "as they are: " + "; ".join(f"{name} {value}" for name, value in found.items()))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self._first + STEPS - 1 and at_step_boundary(trainer):
            self._gradients = allocated(trainer, pl_module, gradients=True)["gradients"]
            self._peak = _peak(pl_module.device)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._gradients is None or trainer.global_step != self._first + STEPS:
            return
        real = allocated(trainer, pl_module) | {"gradients": self._gradients}
        self._gradients = None
        lines = [f"after {STEPS} steps, as they are:"]
        for part, sizes in real.items():
            beside = f"  planned {self.plan.bytes(part) / 1e6:,.2f} MB" if self.plan is not None else ""
            if sizes:
                lines.append(f"  {part:<18}{sum(sizes.values()) / 1e6:>12,.2f} MB  {_types(sizes)}{beside}")
        peak = max(self._peak, _peak(pl_module.device))
        if peak and self.plan is not None:
            lines.append(f"  the device's peak {peak / 1e9:.2f} GB, planned {self.plan.device_bytes / 1e9:.2f} GB")
            for logger in trainer.loggers:
                logger.log_metrics({"memory/planned_gb": self.plan.device_bytes / 1e9}, trainer.global_step - 1)
        self._say(trainer, "\n".join(lines))
        for part in ("parameters", "masters", "optimizer states") if self.plan is not None else ():
            planned, found = self.plan.bytes(part), sum(real[part].values())
            if abs(found - planned) > 0.01 * max(found, planned):
                rank_zero_warn(f"{part} take {found:,} bytes where {planned:,} were planned: the estimate is off")

    def _say(self, trainer: Trainer, text: str) -> None:
        rank_zero_info(text)
        if not trainer.is_global_zero:
            return
        self._lines.append(text)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "start.txt").open("a") as file:
                file.write(text + "\n")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                shown = "\n".join(f"    {line}" for part in self._lines for line in part.splitlines())
                logger.experiment.add_text("start", shown, trainer.global_step)


def _types(dtypes: Any) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
