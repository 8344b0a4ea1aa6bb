"""DeepSpeed ZeRO for Lightning, without the defaults that change what is trained."""

import math
import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, StrategyRegistry
from torch import Tensor

from vla_lm.checkpoint_io import AnyCheckpoint
from vla_lm.pieces import OnePiece, ZeroPieces

OWNED = {
    "gradient_accumulation_steps": "the data module derives it from the global batch",
    "gradient_clipping": "set trainer.gradient_clip_val",
    "optimizer": "set model.optimizer",
    "scheduler": "set model.optimizer.schedule",
    "fp16": "set trainer.precision",
    "bf16": "set trainer.precision",
}

PRECISIONS = ("bf16-mixed", "bf16-true", "32-true", "64-true")

# How long a rank waits for the others before it gives up: longer than a data loader waits for its workers, so that the
# rank at fault speaks first; shorter than DeepSpeed's and gloo's 30 minutes, which cost a large job hours of GPUs.
COLLECTIVE_TIMEOUT = timedelta(minutes=15)

# DeepSpeed's own autocast. It would also send the gradients of the listed modules over the network in bfloat16 and
# round their sums: by default it lists none, and every sum is taken in float32 as DDP takes it.
AUTOCAST = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}


def check_trainer(trainer: Trainer, backend: str) -> None:
    """ValueError for settings of the trainer that cannot be meant, or that Lightning finds only in `fit`.

    Args:
        backend: the model's implementation of the operator.
    """
    cuda, here = isinstance(trainer.accelerator, CUDAAccelerator), trainer.accelerator.name()
    if here not in ("cpu", "cuda"):  # such as auto on a Mac, mps
        raise ValueError(f"trainer.accelerator is {here}, which has no float64 for penalties and metrics: use "
                         "trainer.accelerator cpu, or a CUDA device")
    if backend == "triton" and not cuda and "TRITON_INTERPRET" not in os.environ:
        raise ValueError(f"model.config.backend 'triton' needs CUDA devices, the accelerator here is {here}: "
                         "use backend auto")
    strategy = type(trainer.strategy)
    plain = issubclass(strategy, DeepSpeedStrategy) and not issubclass(strategy, ShardedStrategy)
    if plain or not issubclass(strategy, (SingleDeviceStrategy, DDPStrategy)):
        why = "it divides the loss by the accumulation twice" if plain else "it is not known here"
        raise ValueError(f"trainer.strategy is Lightning's {strategy.__name__}; {why}: use auto, ddp, zero1, zero2 or "
                         "zero3, or a file of configs/strategy")
    if trainer.precision not in PRECISIONS:
        scaled = str(trainer.precision).startswith("16")
        why = ", whose loss scale makes gradients overflow, at which a run stops" * scaled
        raise ValueError(f"trainer.precision is {trainer.precision}{why}: use {', '.join(PRECISIONS[:-1])} or "
                         f"{PRECISIONS[-1]}")
    if trainer.max_steps < 1:
        raise ValueError(f"trainer.max_steps is {trainer.max_steps}: set the number of optimizer steps, "
                         "the data is endless")
    if trainer.fast_dev_run:
        return  # it sets the rest itself
    every, clip = getattr(trainer, "val_check_interval", None), trainer.gradient_clip_val
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"trainer.val_check_interval is {every!r}: use a whole number of optimizer steps, at least 1")
    if trainer.log_every_n_steps < 1:
        raise ValueError(f"trainer.log_every_n_steps is {trainer.log_every_n_steps}: use at least 1 optimizer step")
    if clip is not None and not 0 <= clip < math.inf:
        raise ValueError(f"trainer.gradient_clip_val is {clip!r}: use a norm above 0, or null for no clipping")
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}: leave it out, it follows from "
            "data.global_batch_tokens and data.micro_batch_rows"
        )
    for name, unset in (("max_epochs", (None, -1)), ("limit_train_batches", (1.0,)), ("overfit_batches", (0.0,))):
        if getattr(trainer, name) not in unset:
            raise ValueError(
                f"trainer.{name} is {getattr(trainer, name)}: leave it out, a run's length is trainer.max_steps alone"
            )
    if issubclass(strategy, DeepSpeedStrategy) and not cuda:
        raise ValueError(
            f"trainer.strategy {trainer.strategy.zero_name} (DeepSpeed) needs CUDA devices, the accelerator here is "
            f"{here}: use trainer.strategy ddp (several processes) or auto (one)"
        )
    folder = str(getattr(trainer.checkpoint_callback, "dirpath", None) or "")
    if issubclass(strategy, DeepSpeedStrategy) and set("*?[") & set(folder):
        raise ValueError(f"run_dir leads to {folder}: DeepSpeed takes *, ? and [ in a path for a pattern "
                         "and would not find its checkpoints again; name another folder")


class AutocastPrecision(DeepSpeedPrecision):
    """bf16-mixed as it is without DeepSpeed: weights, gradients and their sums float32, matmuls bfloat16."""

    def convert_input(self, data: Any) -> Any:
        return data

    def forward_context(self) -> AbstractContextManager:
        """For calls beside the engine, such as a callback's probe; the engine's own come to the same."""
        return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16)


class ShardedStrategy(AnyCheckpoint, DeepSpeedStrategy):
    """ZeRO stage 1, 2 or 3 that trains exactly like DDP.

    What it changes, found in the sources of Lightning 2.6 and DeepSpeed 0.19:

    - `DeepSpeedEngine.backward` divides the loss by the accumulation, which Lightning has divided already: it is told
      not to (`scale_wrt_gas=False`).
    - Precision bf16-mixed casts the parameters to bfloat16 in Lightning: here it is DeepSpeed's `torch_autocast`, so
      that parameters, masters, gradients and their sums over ranks are float32 and matmuls bfloat16, as under DDP. The
      lean form is bf16-true: bfloat16 parameters beside float32 masters.
    - Gradients are accumulated in float32 (`data_types.grad_accum_dtype`); DeepSpeed's default is the model's dtype.
    - A step with a non-finite gradient is skipped by the engine while Lightning counts it: here it raises, on all ranks
      together, with the weights untouched.
    - The engine's step counters must agree with the trainer's: checked before each step, and the engine's count of
      micro-batches, which it does not save, is set to steps x accumulation when a checkpoint is loaded.
    - `config` adds to the arguments. Lightning's own discards every argument when a config is given.
    - A model is sharded part by part as it is built (`pieces`), from the weights that every strategy begins with.
    - The micro-batch size, which DeepSpeed needs for its log alone, is not read from the data loader: that would build
      the loader before a checkpoint is restored.

    Args:
        stage: what is sharded over the ranks: 1 optimizer states, 2 and gradients, 3 and parameters.
        config: further DeepSpeed settings (a dictionary or a JSON file's path), merged into those of the arguments.
        **options: as for `lightning.pytorch.strategies.DeepSpeedStrategy`.

    Raises:
        ValueError: another stage, or a config that names a setting which belongs elsewhere.
        FloatingPointError: a gradient was not finite.
        RuntimeError: the engine and the trainer have taken different numbers of steps.
    """

    def __init__(self, stage: int = 1, config: dict[str, Any] | str | None = None, **options: Any) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"ZeRO stage is {stage!r}: use 1, 2 or 3 (for plain data parallelism use strategy: ddp)")
        extra = super()._load_config(config) or {}
        for name, mend in OWNED.items():
            if name in extra:
                raise ValueError(f"the DeepSpeed config sets {name!r}: remove it there, {mend}")
        named = extra.get("zero_optimization", {}).get("stage", stage)
        if named != stage:
            raise ValueError(f"stage is {stage} and the DeepSpeed config says {named}: give them the same value")
        options.setdefault("logging_batch_size_per_gpu", 1)
        super().__init__(stage=stage, config=None, **options)
        self.config = _merged(self.config, {"data_types": {"grad_accum_dtype": "fp32"}}, extra)

    def _load_config(self, config: Any) -> None:
        """Nothing: `__init__` merges the config, and the environment variable's, instead of replacing the arguments."""

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if isinstance(plugin, DeepSpeedPrecision):
            if plugin.precision == "bf16-mixed":
                self.config = _merged({"torch_autocast": AUTOCAST}, self.config, {"bf16": {"enabled": False}})
            if self.config.get("torch_autocast", {}).get("dtype") == "bfloat16":
                self.config = _merged({"torch_autocast": AUTOCAST}, self.config)
                plugin = AutocastPrecision(plugin.precision)
        self._precision_plugin = plugin

    @property
    def zero_name(self) -> str:
        """As a configuration names it: zero1, zero2 or zero3."""
        return f"zero{self.config['zero_optimization']['stage']}"

    @property
    def pieces(self) -> OnePiece:
        """How a model is to be built under this strategy."""
        self._init_config_if_needed()
        return ZeroPieces(self.config, self.remote_device) if self.zero_stage_3 else OnePiece()

    def model_sharded_context(self) -> AbstractContextManager:
        return nullcontext()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        content = super().load_checkpoint(*args, **kwargs)
        self.set_steps(self.deepspeed_engine.global_steps)
        return content

    def set_steps(self, steps: int) -> None:
        """Make the engine's counters those after `steps` optimizer steps at the present accumulation."""
        engine = self.deepspeed_engine
        engine.global_steps = steps
        engine.micro_steps = steps * engine.gradient_accumulation_steps()
        engine.global_samples = steps * engine.train_batch_size()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        engine, step = self.deepspeed_engine, self.lightning_module.trainer.global_step
        if engine.global_steps != step:
            raise RuntimeError(
                f"DeepSpeed has taken {engine.global_steps} optimizer steps and the trainer {step}: the checkpoint "
                "that was loaded is inconsistent; resume from an older one"
            )
        skipped = engine.skipped_steps
        result = super().optimizer_step(*args, **kwargs)
        if engine.skipped_steps > skipped:
            raise FloatingPointError(
                f"optimizer step {step + 1}: a gradient is not finite; the weights are those of step {step}. "
                "Resume from the last checkpoint with a smaller gradient_clip_val, or start anew, learning rate lower"
            )
        return result


def _merged(*configs: dict[str, Any]) -> dict[str, Any]:
    # Later ones win, dictionaries are merged key by key.
    out: dict[str, Any] = {}
    for config in configs:
        for name, value in config.items():
            both = isinstance(value, dict) and isinstance(out.get(name), dict)
            out[name] = _merged(out[name], value) if both else value
    return out


# So that a configuration or a command line can say trainer.strategy: zero3.
for _stage in (1, 2, 3):
    StrategyRegistry.register(f"zero{_stage}", ShardedStrategy, f"DeepSpeed ZeRO stage {_stage}", override=True,
                              stage=_stage, timeout=COLLECTIVE_TIMEOUT)
# Also what Lightning takes for strategy auto with several processes.
StrategyRegistry.register("ddp", DDPStrategy, "data parallel", override=True, start_method="popen",
                          timeout=COLLECTIVE_TIMEOUT)
