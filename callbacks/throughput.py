"""How fast a run trains: tokens per second, step time, waiting for data, memory, model FLOPs utilisation."""

import resource
import sys
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

# Dense bf16 tensor-core FLOP/s by device name, from the vendors' data sheets (fp16 where the card has no bf16; with
# float32 accumulation). The first entry whose text is in the name counts: the variants stand before the plain name.
PEAK_FLOPS = {
    "GB200": 2500e12, "B300": 2250e12, "B200": 2250e12,
    "H200 NVL": 835e12, "GH200": 989e12, "H200": 989e12,
    "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "H20": 148e12,
    "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12,
    "RTX 6000 Ada": 364e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "RTX 5090": 209.5e12, "RTX 4090": 165.2e12, "RTX 3090": 71e12, "RTX A6000": 154.8e12,
    "V100": 125e12, "T4": 65e12, "MI300X": 1307e12,
}  # fmt: skip

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in ru_maxrss's unit


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of the device of that name (``torch.cuda.get_device_name()``); None when unknown."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


class _FetchClock:
    """Stands before the trainer's profiler and measures the one action the profiler is told of: fetching a batch."""

    def __init__(self, profiler: Any, owner: "Throughput") -> None:
        self.profiler, self.owner = profiler, owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.profiler, name)

    def start(self, action: str) -> None:
        self.profiler.start(action)
        if action.endswith("train_dataloader_next"):
            self.owner.fetch_starts()

    def stop(self, action: str) -> None:
        if action.endswith("train_dataloader_next"):
            self.owner.fetch_ends()
        self.profiler.stop(action)


class Throughput(Callback):
    """Logs ``throughput/*``, means since the last logging, every ``log_every_n_steps`` optimizer steps:

    ``tokens_per_second`` (valid targets, all ranks), ``positions_per_second`` (every position of the batch, with or
    without a target), ``step_seconds`` and ``data_wait_seconds`` per optimizer step, ``device_memory_gb`` (peak since
    the last logging; CUDA only), ``host_memory_gb`` (peak resident memory of rank 0's process) and ``mfu``.

    MFU is model FLOPs over the devices' peak in dense bf16: ``pl_module.flops_per_token(row_tokens)`` times positions
    per second; it is left out where the peak is unknown. Validation and saving are not counted, nor is the first
    step, which compiles and tunes. The numbers stay on the device until logging: no synchronisation in between.

    Args:
        peak_flops: FLOP/s of one device; null: the table's value for the card, none on a CPU.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops {peak_flops} must be above 0: the FLOP/s of one device, such as 989e12.")
        self.peak_flops = peak_flops
        self.latest: dict[str, float] = {}
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            trainer.profiler = _FetchClock(trainer.profiler, self)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.profiler, _FetchClock):
            trainer.profiler = trainer.profiler.profiler

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._begun: float | None = None  # None until the first step is over
        self._paused = False
        self._batch_end = self._fetch_start = perf_counter()
        if self.peak_flops is None and pl_module.device.type == "cuda":
            self.peak_flops = peak_flops(torch.cuda.get_device_name(pl_module.device))

    def _restart(self, device: torch.device) -> None:
        self._begun, self._steps, self._pause, self._wait = perf_counter(), 0, 0.0, 0.0
        self._targets, self._positions = torch.zeros((), dtype=torch.int64, device=device), 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # else training still queued would count as validation
        self._paused = True

    def on_save_checkpoint(self, *_: Any) -> None:
        self._paused = True

    def fetch_starts(self) -> None:
        self._fetch_start = perf_counter()
        if self._paused and self._begun is not None:
            self._pause += self._fetch_start - self._batch_end
        self._paused = False

    def fetch_ends(self) -> None:
        if self._begun is not None:
            self._wait += perf_counter() - self._fetch_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped, self._step = trainer.global_step > self._step, trainer.global_step
        if self._begun is not None:
            self._positions += batch["tokens"].numel() * trainer.world_size
            if stepped:
                self._steps += 1
                self._targets += batch["target_count"]
                self._row_tokens = batch["tokens"].shape[1]
                if self._step % trainer.log_every_n_steps == 0:
                    self._log(trainer, pl_module)
        elif stepped:
            self._restart(pl_module.device)
        self._batch_end = perf_counter()

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        targets = self._targets.item()  # waits for the device: the clock read next is exact
        seconds = perf_counter() - self._begun - self._pause
        device = pl_module.device
        found = {
            "tokens_per_second": targets / seconds,
            "positions_per_second": self._positions / seconds,
            "step_seconds": seconds / self._steps,
            "data_wait_seconds": self._wait / self._steps,
            "host_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / 1e9,
        }
        if device.type == "cuda":
            found["device_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        if self.peak_flops is not None:
            flops = pl_module.flops_per_token(self._row_tokens) * self._positions / seconds
            found["mfu"] = flops / (self.peak_flops * trainer.world_size)
        self.latest = found
        pl_module.log_dict({f"throughput/{name}": value for name, value in found.items()}, on_step=True, on_epoch=False)
        self._restart(device)
