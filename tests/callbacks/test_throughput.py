"""Known answers: tokens, times and utilisation of a run whose clock is made by hand."""

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from callbacks import Throughput
from callbacks import throughput as module
from callbacks.throughput import peak_flops
from tests.callbacks.tiny import ROW, TinyData, TinyModel, trainer


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedData(TinyData):
    def __init__(self, clock, **kwargs):
        super().__init__(**kwargs)
        self.clock = clock

    def train_dataloader(self):
        loader = super().train_dataloader()
        collate = loader.collate_fn

        def slow(rows):
            self.clock.now += 0.25
            return collate(rows)

        loader.collate_fn = slow
        return loader


class TimedModel(TinyModel):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def training_step(self, batch, batch_idx):
        # The first step, which compiles, takes longer and does not count.
        self.clock.now += 100.0 if self.trainer.global_step == 0 else 0.75
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self):
        super().on_validation_epoch_start()
        self.clock.now += 1000.0

    def on_save_checkpoint(self, checkpoint):
        self.clock.now += 1000.0


class Saver(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            trainer.save_checkpoint(trainer.default_root_dir + "/x.ckpt")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_known_answers(tmp_path, monkeypatch, accumulation):
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    data = TimedData(clock, steps=9, step_rows=4, micro=4 // accumulation)
    throughput = Throughput(peak_flops=1e6)
    run = trainer(tmp_path, 9, [throughput, Saver()], accumulate_grad_batches=accumulation, log_every_n_steps=4,
                  val_check_interval=3 * accumulation)  # fmt: skip
    profiler = run.profiler
    seen = []
    original = throughput._log
    monkeypatch.setattr(throughput, "_log", lambda *a: (original(*a), seen.append(dict(throughput.latest))))
    run.fit(TimedModel(clock), datamodule=data)
    assert run.profiler is profiler
    rows = data.train_dataloader().dataset
    for index, steps in enumerate([range(1, 4), range(4, 8)]):  # the first window lacks the first step
        targets = sum(int((rows.targets[4 * s : 4 * s + 4] >= 0).sum()) for s in steps)
        seconds = len(steps) * accumulation * 1.0
        found = seen[index]
        assert found["step_seconds"] == pytest.approx(accumulation)
        assert found["data_wait_seconds"] == pytest.approx(0.25 * accumulation)
        assert found["tokens_per_second"] == pytest.approx(targets / seconds)
        assert found["positions_per_second"] == pytest.approx(len(steps) * 4 * ROW / seconds)
        assert found["mfu"] == pytest.approx(1000 * ROW * len(steps) * 4 * ROW / seconds / 1e6)
        assert 0.05 < found["host_memory_gb"] < 100
        assert "device_memory_gb" not in found
    assert len(seen) == 2
    assert run.logged_metrics["throughput/tokens_per_second"] == pytest.approx(seen[1]["tokens_per_second"])


def test_no_utilisation_on_a_cpu_and_no_synchronisation_between_loggings(tmp_path, monkeypatch):
    def reads(callbacks):
        seed_everything(1, verbose=False)
        counted, read = [], torch.Tensor.item
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda self: counted.append(1) or read(self))
            trainer(tmp_path, 5, callbacks, accumulate_grad_batches=2, log_every_n_steps=5, limit_val_batches=0).fit(
                TinyModel(), datamodule=TinyData(step_rows=4, micro=2)
            )
        return len(counted)

    throughput = Throughput()
    without = reads([])
    assert reads([throughput]) == without + 1
    assert "mfu" not in throughput.latest and throughput.latest["tokens_per_second"] > 0


@pytest.mark.parametrize(
    "name, flops",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("Tesla T4", 65e12),
        ("Some card", None),
    ],
)
def test_peaks(name, flops):
    assert peak_flops(name) == flops


def test_bad_peak():
    with pytest.raises(ValueError, match="peak_flops 0 must be above 0"):
        Throughput(peak_flops=0)
