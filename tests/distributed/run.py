"""Trains the same few steps in every way, on one process or as one of two gloo processes; see test_equivalence.py.

    python run.py FOLDER STORE [CASES]      with WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for two processes

CASES names one of the functions at the end, every_case by default. Each case leaves FOLDER/<case>.pt, as `record` has
it.
"""

import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from callbacks import (
    FiniteGuard,
    GradientNorms,
    JsonlLogger,
    NonFiniteError,
    RunCheckpoint,
    StartReport,
    StateNorms,
    Throughput,
    newest_complete,
    read_metrics,
)
from callbacks.allocated import allocated
from callbacks.gradients import at_step_boundary
from data.documents import DocumentsDataModule
from data.mqar import MQARDataModule
from vla_lm.config import ModelConfig, OptimizerConfig
from vla_lm.module import LanguageModel
from vla_lm.strategy import ShardedStrategy

STEPS, STOP, NAN_STEP = 6, 4, 4
ROWS, LENGTH, VOCAB = 8, 26, 32
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
# The ways to train.
WAYS = {1: ["one"], 2: ["ddp", "zero1", "zero2", "zero3"]}[WORLD]
# The accumulation of their resumed runs: not all alike, as the tests' time is short.
RESUMED = {"one": 4, "ddp": 1, "zero1": 4, "zero2": 1, "zero3": 4}


class CPUShardedStrategy(ShardedStrategy):
    """ZeRO on two CPU processes, which Lightning refuses."""

    def setup_environment(self) -> None:
        self.parallel_devices = [torch.device("cpu", index) for index in range(WORLD)]
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()


def strategy(way: str, precision: str = "32-true"):
    """one, ddp, zero1, zero2, zero3, or zero2-offload and zero3-offload: the optimizer on the host.

    As configs/strategy/*.yaml; bf16-true is their lean form.
    """
    if way == "one":
        return "auto"
    settings = {"process_group_backend": "gloo", "cluster_environment": LightningEnvironment()}
    if way == "ddp":
        return DDPStrategy(**settings)
    if way.endswith("-offload"):
        settings |= {"offload_optimizer": True, "config": {"zero_force_ds_cpu_optimizer": False}}
    config = settings.setdefault("config", {})
    if precision == "bf16-true":
        config["communication_data_type"] = "fp32"
    if way[4] == "3":  # by default all of so small a model would stay whole: norms alone shall
        config["zero_optimization"] = {"stage3_param_persistence_threshold": 100}
    return CPUShardedStrategy(stage=int(way[4]), **settings)


class Poison(pl.Callback):
    """Makes the gradient NaN below the first layer's output, on the last rank, in the last micro-batch of NAN_STEP."""

    def on_train_start(self, trainer, pl_module):
        def hook(grad):
            last = trainer.fit_loop.epoch_loop._accumulated_batches_reached()
            wanted = trainer.global_step == NAN_STEP - 1 and last and trainer.global_rank == WORLD - 1
            return grad * float("nan") if wanted else grad

        def watch(module, args, out):  # ZeRO-3 leaves no whole parameter to hook
            if out[0].requires_grad:
                out[0].register_hook(hook)

        pl_module.transformer.layers[0].register_forward_hook(watch)


class Stop(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step == STOP


class Watch(pl.Callback):
    """The whole weights after each step and at an exception; DeepSpeed's own gradient norms; bytes allocated."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.engine_norms: list[float] = []
        self.allocated: dict[str, dict[torch.dtype, int]] = {}

    def on_train_start(self, trainer, pl_module):
        self.weights[trainer.global_step] = whole(pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == STEPS - 1 and at_step_boundary(trainer):
            self.allocated["gradients"] = allocated(trainer, pl_module, gradients=True)["gradients"]
        elif trainer.global_step == STEPS - 1:  # DeepSpeed alone comes here between micro-batches
            whole_gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.allocated["between"] = {torch.float32: sum(grad.nbytes for grad in whole_gradients)}

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == STEPS:
            self.allocated = allocated(trainer, pl_module) | self.allocated
        if trainer.global_step not in self.weights:
            self.weights[trainer.global_step] = whole(pl_module)
            if hasattr(trainer.model, "get_global_grad_norm"):
                self.engine_norms.append(float(trainer.model.get_global_grad_norm()))

    def on_exception(self, trainer, pl_module, exception):
        self.at_exception = whole(pl_module)


def whole(module) -> dict[str, torch.Tensor]:
    """Every rank must call it: name -> whole parameter in float32."""
    weights = {}
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            from deepspeed.utils import safe_get_full_fp32_param

            parameter = safe_get_full_fp32_param(parameter)
        weights[name] = parameter.detach().clone()
    return weights


def model_config(vocab_size: int, style: str, **fields) -> ModelConfig:
    sizes = dict(vocab_size=vocab_size, d_model=16, n_layers=2, n_heads=2, max_positions=LENGTH)
    return ModelConfig(**sizes, mixer="vla", style=style, **fields)


def train(folder: Path, way: str, accumulation: int, resume=None, store=None, precision="32-true", extra=(),
          fields=None, implementation="torch", guarded=True) -> Watch:  # fmt: skip
    """One run of STEPS optimizer steps of ROWS rows: associative recall, or the documents of a store, carried on.

    `fields`: further ones of ModelConfig; `implementation`: of AdamW; `guarded`: with FiniteGuard.
    """
    pl.seed_everything(3, verbose=False)
    rows = {"micro_batch_rows": ROWS // WORLD // accumulation, "val_rows": 8, "val_batch_rows": 4}
    if store is None:
        data = MQARDataModule(vocab_size=VOCAB, n_pairs=[2, 6], length=LENGTH, global_batch_tokens=ROWS * LENGTH,
                              val_n_pairs=[6], **rows)  # fmt: skip
    else:
        data = DocumentsDataModule(store, source=None, vocab_size=None, row_tokens=32, carry_state=True,
                                   global_batch_tokens=ROWS * 32, **rows)  # fmt: skip
    model = LanguageModel(
        model_config(None, "modern" if store else "paper", **fields or {}),
        # A large epsilon: Adam's step for a gradient of rounding noise alone would otherwise have a random sign.
        OptimizerConfig(learning_rate=3e-3, warmup_steps=2, eps=1e-4, implementation=implementation),
    )  # fmt: skip
    watch = Watch()
    callbacks = [StartReport(folder), *[FiniteGuard()] * guarded, GradientNorms(), Throughput(),
                 StateNorms(every_n_steps=2), watch, *extra,
                 RunCheckpoint(folder / "checkpoints", every_n_train_steps=2, keep_last=3)]  # fmt: skip
    trainer = pl.Trainer(
        strategy=strategy(way, precision), accelerator="cpu", devices=WORLD, max_steps=STEPS, gradient_clip_val=0.5,
        log_every_n_steps=1, val_check_interval=2 * accumulation, callbacks=callbacks, logger=JsonlLogger(folder),
        use_distributed_sampler=False, num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, precision=precision,
    )  # fmt: skip
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return watch


def record(folder: Path, case: str, watch: Watch) -> None:
    """Rank 0: {"losses", "val": {step: loss}, "norms": [{layer: norm}], "state_norms", "weights", "began", …}."""
    if RANK == 0:
        lines = read_metrics(folder / case / "metrics.jsonl")
        norms = [{key.removeprefix("gradient_norm/"): value for key, value in line.items() if "gradient_norm/" in key}
                 for line in lines if "gradient_norm/global" in line]  # fmt: skip
        found = {
            "losses": {line["step"]: line["train/loss"] for line in lines if "train/loss" in line},
            "val": {line["step"]: line["val/loss"] for line in lines if "val/loss" in line},
            "norms": norms,
            "engine_norms": watch.engine_norms,
            "state_norms": [line["state_norm/layers.1"] for line in lines if "state_norm/layers.1" in line],
            "weights": watch.weights[STEPS],
            "initial": watch.weights[min(watch.weights)],
            "began": min(watch.weights),
            "allocated": watch.allocated,
        }
        torch.save(found, folder / f"{case}.pt")


def resumed(folder: Path, case: str, way: str, accumulation: int, **settings) -> None:
    """Stopped after STOP of STEPS steps, then resumed."""
    train(folder / case, way, accumulation, extra=[Stop()], **settings)
    record(folder, case, train(folder / case, way, accumulation, resume=newest_complete(folder / case), **settings))


def poisoned(folder: Path, case: str, way: str, **settings) -> None:
    watch, stopped = Watch(), None
    try:
        train(folder / case, way, 2, extra=[Poison(), watch], **settings)
    except NonFiniteError as error:
        stopped = {"step": error.step, "layer": error.layer, "message": str(error)}
    except FloatingPointError as error:
        stopped = {"message": str(error)}
    torch.save((stopped, watch.weights, watch.at_exception), folder / f"{case}-rank{RANK}.pt")


def every_case(folder: Path, store: str) -> None:
    for way in WAYS:
        for accumulation in (1, 4):
            case = f"{way}-{accumulation}"
            record(folder, case, train(folder / case, way, accumulation))
        resumed(folder, f"{way}-resumed", way, RESUMED[way])
        poisoned(folder, f"{way}-nan", way)
    for way in [way for way in WAYS if way in ("one", "ddp", "zero3")]:
        case = f"{way}-documents"
        record(folder, case, train(folder / case, way, 2, store=store))
        # The blocks of the resumed run are computed again in the backward pass: the same bits.
        resumed(folder, f"{case}-resumed", way, 2, store=store, fields={"activation_checkpointing": True})
    if WORLD == 1:
        record(folder, "one-mixed", train(folder / "one-mixed", "one", 1, precision="bf16-mixed"))
    else:
        record(folder, "zero3-mixed", train(folder / "zero3-mixed", "zero3", 1, precision="bf16-mixed"))


def offload_and_lean(folder: Path, store: str) -> None:
    if WORLD == 1:
        record(folder, "one-1", train(folder / "one-1", "one", 1))
        record(folder, "one-fused", train(folder / "one-fused", "one", 1, implementation="fused"))
        record(folder, "one-mixed", train(folder / "one-mixed", "one", 1, precision="bf16-mixed"))
        return
    for way in ("zero2-offload", "zero3-offload"):
        record(folder, way, train(folder / way, way, 4))
        resumed(folder, f"{way}-resumed", way, 4)
        poisoned(folder, f"{way}-nan", way)
    record(folder, "zero3-fused", train(folder / "zero3-fused", "zero3-offload", 4, implementation="fused"))
    for way in ("zero1", "zero2", "zero3"):
        poisoned(folder, f"{way}-unguarded-nan", way, guarded=False)
    # In this order: DeepSpeed's autocast, once on in a process, decides all further runs' types of communication.
    for name, precision in (("lean", "bf16-true"), ("mixed", "bf16-mixed")):
        for way in ("zero1", "zero2", "zero3"):
            case = f"{way}-{name}"
            record(folder, case, train(folder / case, way, 4, precision=precision))
            resumed(folder, f"{case}-resumed", way, 4, precision=precision)
            poisoned(folder, f"{case}-nan", way, precision=precision)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[3] if len(sys.argv) > 3 else "every_case"](Path(sys.argv[1]), sys.argv[2])
