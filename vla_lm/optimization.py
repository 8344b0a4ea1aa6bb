"""AdamW with its parameter groups, and learning-rate schedules that are pure functions of the optimizer step."""

import math
from collections.abc import Callable

from torch import nn
from torch.optim import AdamW, Optimizer

from vla_lm.config import OptimizerConfig
from vla_lm.convolution import ShortConvolution


def learning_rate_factor(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Share of the peak learning rate at which optimizer step `step` (from 0) of `max_steps` trains.

    Linear warm-up over `warmup_steps`; then constant, a cosine to `min_ratio` that ends with the run, or (wsd) constant
    until the last `decay_fraction` of the run, which falls linearly to `min_ratio`.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, max_steps - round(config.decay_fraction * max_steps))
    if step < start:
        return 1.0
    # Step `max_steps` would be the first at the last value: training ends one step before it.
    done = min(1.0, (step - start) / max(1, max_steps - start))
    shape = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.min_ratio + (1 - config.min_ratio) * shape


def schedule(config: OptimizerConfig, max_steps: int) -> Callable[[int], float]:
    """`learning_rate_factor` of the step alone, for `LambdaLR`.

    Raises:
        ValueError: the schedule ends with the run, but the run has no number of steps; or warm-up fills the run.
    """
    if config.schedule == "constant":
        return lambda step: learning_rate_factor(config, step, max_steps)
    if max_steps < 1:
        raise ValueError(
            f"schedule {config.schedule!r} needs trainer.max_steps, which is {max_steps}: set it, or use constant"
        )
    if 1 < max_steps <= config.warmup_steps:
        raise ValueError(
            f"warmup_steps {config.warmup_steps} leaves nothing of trainer.max_steps {max_steps}: "
            "lower warmup_steps or raise max_steps"
        )
    return lambda step: learning_rate_factor(config, step, max_steps)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices of linear maps and convolutions, decayed; norms, biases, embeddings and the rest, not.

    Shared parameters (tied embeddings) appear once, undecayed.
    """
    decayed, others = [], []
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Linear, ShortConvolution))}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if id(parameter) in matrices - embeddings else others).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW over `parameter_groups`, by the configured implementation.

    Raises:
        ValueError: DeepSpeed's cannot be compiled here.
    """
    groups = parameter_groups(model, config.weight_decay)
    settings = dict(lr=config.learning_rate, betas=tuple(config.betas), eps=config.eps)
    if config.implementation == "deepspeed_cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # deepspeed takes seconds to import

        try:
            return DeepSpeedCPUAdam(groups, **settings)  # AdamW is its default mode
        except Exception as error:
            raise ValueError(f"model.optimizer.implementation deepspeed_cpu cannot be compiled here ({error}): "
                             "install a C++ compiler and ninja, or use fused") from error
    return AdamW(groups, fused=config.implementation == "fused" or None, **settings)


def check_learning_rate(optimizer: Optimizer, config: OptimizerConfig, step: int, max_steps: int) -> None:
    """ValueError unless the optimizer's learning rate is the schedule's at `step`; after a resume they must agree."""
    expected = config.learning_rate * schedule(config, max_steps)(step)
    for group in optimizer.param_groups:
        if not math.isclose(group["lr"], expected, rel_tol=1e-9, abs_tol=1e-15):
            raise ValueError(
                f"the checkpoint's learning rate at step {step} is {group['lr']:.9g}, the configured schedule gives "
                f"{expected:.9g}: resume with the learning_rate, schedule, warmup_steps and max_steps it was trained "
                "with, or start a new run"
            )
