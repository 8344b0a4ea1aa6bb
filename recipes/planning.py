"""What a configuration needs before it starts: the memory of each rank, and a token store."""

import os
import shlex
from typing import Any

from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)

from data.corpus import Corpus
from data.token_store import StoreRequest
from vla_lm import strategy as registered  # noqa: F401 - zero1, zero2, zero3 and ddp
from vla_lm.config import ModelConfig
from vla_lm.memory_plan import MemoryPlan, Sharding, plan_memory

# Lightning's short forms of trainer.precision.
FULL_NAME = {None: "32-true", 32: "32-true", "32": "32-true", "bf16": "bf16-mixed", 64: "64-true", "64": "64-true"}


def count(number: int | str, thing: str) -> str:
    """A number and its noun: 1 node, 2 nodes."""
    return f"{number} {thing}{'s' * (number != 1)}"


def strategy_of(trainer: dict[str, Any], ranks: int) -> Strategy:
    """The strategy that trainer.strategy describes: a registered name, or class_path and init_args."""
    asked = trainer["strategy"]
    if not isinstance(asked, str):
        return instantiate_class((), asked)
    if asked == "auto" and ranks == 1:
        return SingleDeviceStrategy()
    name = "ddp" if asked == "auto" else asked
    known = StrategyRegistry.get(name) if name in StrategyRegistry else None
    if not isinstance(known, (DDPStrategy, DeepSpeedStrategy)):
        raise ValueError(f"trainer.strategy is {asked!r}: expected auto, ddp, zero1, zero2 or zero3, or a file of "
                         "configs/strategy (--config configs/strategy/zero3.yaml)")
    return known


def memory(config: dict[str, Any], data: Any, ranks: int, device: str) -> MemoryPlan:
    """What a rank will hold, from the configuration alone. ValueError for a precision that no plans are made for.

    Args:
        config: groups model and trainer.
        data: the run's data module; its vocab_size must be known.
        device: "cuda" or "cpu".
    """
    trainer, fields, plan = config["trainer"], config["model"]["config"], data.batch_plan(ranks)
    precision = FULL_NAME.get(trainer["precision"], trainer["precision"])
    model = ModelConfig.from_dict(fields | {"vocab_size": fields["vocab_size"] or data.vocab_size})
    sharding = Sharding.of(strategy_of(trainer, ranks), precision, ranks)
    return plan_memory(model, sharding, plan.micro_rows, data.row_tokens, plan.accumulation,
                       getattr(data, "carry_state", False), device)


def store_problem(data: Any, ranks: int) -> str | None:
    """Why the run would not get its token store, with the mend; None where it will, or where its data needs none."""
    path = getattr(data, "store_path", None)
    if path is None:
        return None
    if os.path.exists(path):
        try:
            data.prepare_data()  # makes nothing where something is: checks that it is the store asked for
            data.setup("validate")
        except (ValueError, OSError) as error:
            return str(error)
    elif data.request is None:
        return (f"the token store {path} is not there, and data.source is null: name the store, or set data.source and "
                f"make it beforehand with\n    python -m recipes.prepare --source SOURCE --vocab_size N --out "
                f"{shlex.quote(path)}")
    elif ranks > 1:
        return (f"the token store {path} is not there, and {ranks} ranks would wait for one that makes it: make it "
                f"beforehand with\n    {prepare_line(data.request, path)}")
    return None


def prepare_line(request: StoreRequest, path: str) -> str:
    """The command that makes this store; options that are recipes.prepare's own defaults are left out."""
    usual, options = StoreRequest(Corpus(("sotu",))).settings(), []
    for name, value in request.settings().items():
        if value is not None and value != usual[name]:
            options += ["--source", *value] if name == "sources" else [f"--{name}", str(value)]
    return shlex.join(["python", "-m", "recipes.prepare", *options, "--out", path])
