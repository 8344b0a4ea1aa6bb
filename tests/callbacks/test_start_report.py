"""The report at start: the plan before anything is allocated, a warning with the mend, what is real after two steps."""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from callbacks import StartReport
from callbacks.allocated import allocated
from tests.callbacks.tiny import TinyData, TinyModel, trainer
from vla_lm.config import ModelConfig
from vla_lm.memory_plan import Sharding, plan_memory


@dataclass
class Plan:
    sizes: dict[str, int]

    def bytes(self, part):
        return self.sizes.get(part, 0)

    @property
    def device_bytes(self):
        return sum(self.sizes.values())

    @property
    def largest(self):
        return SimpleNamespace(name="activations", bytes=self.sizes["activations"])

    def mend(self):
        return "lower data.micro_batch_rows"

    def __str__(self):
        return "  the plan's table"


class Planned(TinyModel):
    def __init__(self, wrong: int = 0) -> None:
        super().__init__()
        count = sum(p.numel() for p in self.parameters())
        sizes = {"parameters": 4 * count + wrong, "optimizer states": 8 * count, "activations": 2_000_000_000_000}
        self.plan, self.asked = Plan(sizes), 0

    def memory_plan(self):
        self.asked += 1
        assert self.trainer is not None and not self.trainer.optimizers, "before anything is allocated"
        return self.plan

    def state_dtypes(self):
        return {"memory.S": torch.float32, "tail": torch.bfloat16}


def fit(tmp_path, model, steps=3):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(tmp_path, steps, [StartReport(tmp_path / "run")], logger).fit(model, datamodule=TinyData())
    text = (tmp_path / "run/start.txt").read_text() if (tmp_path / "run/start.txt").exists() else ""
    return text, [str(warning.message) for warning in told]


def test_the_plan_the_types_and_what_is_real(tmp_path):
    model = Planned()
    text, told = fit(tmp_path, model)
    plan, types, real = (text.split("memory that each of ")[1], text.split("as they are: ")[1],
                         text.split("after 2 steps")[1])
    assert model.asked == 1 and plan.startswith("1 ranks will need, an estimate:\n  the plan's table\n")
    assert types.startswith("parameters float32; masters (the parameters themselves); gradients' sums over ranks "
                            "(one rank); recurrent states memory.S float32, tail bfloat16; "
                            "precision 32-true")  # fmt: skip
    count = sum(p.numel() for p in model.parameters())
    for part, each in (("parameters", 4), ("gradients", 4), ("optimizer states", 8)):
        line, = [line for line in real.splitlines() if line.strip().startswith(part)]
        assert f"{each * count / 1e6:,.2f} MB  float32" in line
    assert "masters" not in real and "peak" not in real, "none, and no GPU here"
    assert not [line for line in told if "planned" in line or "free" in line]
    events = b"".join(path.read_bytes() for path in tmp_path.glob("events*"))
    assert b"the plan's table" in events and b"after 2 steps" in events


def test_a_plan_that_is_off_is_told(tmp_path):
    _, told = fit(tmp_path, Planned(wrong=1000))
    assert [line for line in told if line.startswith("parameters take ") and "the estimate is off" in line]


def test_too_little_free_memory_names_the_largest_part_and_the_mend(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 10**9, 80 * 10**9))
    report, model = StartReport(), Planned()
    run = trainer(tmp_path, 1, [report])
    model._trainer = run
    monkeypatch.setattr(type(run.strategy), "root_device", torch.device("cuda", 3))
    with pytest.warns(UserWarning, match="cuda:3 has 80.0 GB free and a rank is estimated to need 2000.0 GB, most "
                                         "of it activations .2000.0 GB.: lower data.micro_batch_rows"):  # fmt: skip
        report.setup(run, model, "fit")


def test_a_model_without_a_plan_and_a_precision_without_one(tmp_path):
    text, _ = fit(tmp_path, TinyModel())
    assert "estimate" not in text and "recurrent states none" in text and "optimizer states" in text

    class Unplanned(Planned):
        def memory_plan(self):
            raise ValueError("precision '64-true': plans are made for others")

    text, _ = fit(tmp_path / "other", Unplanned())
    assert "no estimate of the memory that a rank needs: precision '64-true'" in text and "after 2 steps" in text


@pytest.mark.parametrize("view", [False, True])
def test_ddp_s_buckets_are_measured_and_planned_alike(view, tmp_path):
    model = TinyModel()
    settings = {"process_group_backend": "gloo", "cluster_environment": LightningEnvironment()}
    strategy = DDPStrategy(**settings, gradient_as_bucket_view=view)
    found = {}

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            found.update(allocated(trainer, pl_module, gradients=True))

    try:
        run = trainer(tmp_path, 2, [Watch()], strategy=strategy)
        run.fit(model, datamodule=TinyData())
    finally:
        distributed.destroy_process_group()
    sharding, whole = Sharding.of(strategy, "32-true", 1), 4 * sum(p.numel() for p in model.parameters())
    assert found["gradients"] == {torch.float32: whole}
    assert found["buckets"] == ({} if view else {torch.float32: whole})
    config = ModelConfig(vocab_size=32, d_model=16)
    plan = plan_memory(config, sharding, rows=1, row_tokens=8)
    assert plan.bytes("gradients") == plan.bytes("parameters")
    assert plan.bytes("buckets") == (0 if view else plan.bytes("gradients"))


def test_a_shared_storage_counts_once(tmp_path):
    model = TinyModel()
    run = trainer(tmp_path, 1)
    run.fit(model, datamodule=TinyData())
    before = allocated(run, model)
    assert before["gradients"] == {} and set(before["optimizer states"]) == {torch.float32}
    model.head.weight = model.embedding.weight
    tied = allocated(run, model)["parameters"][torch.float32]
    assert tied == before["parameters"][torch.float32] - model.head.weight.numel() * 4
