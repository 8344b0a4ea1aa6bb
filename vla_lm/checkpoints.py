"""Load a trained model from a run's folder or any checkpoint; check one before a resume."""

import math
from pathlib import Path
from typing import Any

import torch

from vla_lm.checkpoint_files import is_neutral, marker_of, newest_complete, read_marker
from vla_lm.config import ModelConfig, OptimizerConfig
from vla_lm.module import LanguageModel
from vla_lm.native import NativeCheckpoint, read_content
from vla_lm.neutral import MOMENTS, NeutralCheckpoint, portable
from vla_lm.optimization import learning_rate_factor

# Fields of ModelConfig that change how, not what, is computed.
_IMMATERIAL = {"chunk_size", "backend", "init_std", "activation_checkpointing"}


def load_model(
    path: str | Path, device: str | torch.device = "cpu", trust_pickle: bool = False, verify: bool = True
) -> LanguageModel:
    """The model of a checkpoint, in evaluation mode, its weights in float32.

    Args:
        path: a run's folder (its newest complete checkpoint), or a checkpoint: `step=000500.ckpt` (a file, or
            DeepSpeed's folder) with its `.complete` marker beside it, or a neutral one (`step=000500.neutral`).
        device: where to put the model; "auto": a GPU where there is one.
        trust_pickle: read DeepSpeed's folder even outside a run's folder; its pickles can run any code.
        verify: compare checksums first, which reads the whole checkpoint; False where that was done just now.

    Raises:
        FileNotFoundError: no such path, or no complete checkpoint in the run's folder.
        ValueError: half-written, damaged, not of this project, or its weights do not fit its configuration.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()  # to be made is not enough: "meta" computes nothing
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"device {device!r} cannot be used ({str(error).splitlines()[0]}): use auto or cpu") from None
    path = complete_checkpoint(path, verify)
    hyper = _read(path, trust_pickle)["hyper_parameters"]
    model = LanguageModel(ModelConfig.from_dict(hyper["config"]), OptimizerConfig.from_dict(hyper["optimizer"]))
    if is_neutral(path):
        neutral = NeutralCheckpoint(path)
        weights = {name: neutral.tensor("weights", name) for name in neutral.names("weights")}
    else:
        weights = {name: read() for name, read in NativeCheckpoint(path).weights.items()}
    load_weights(model, weights, path)
    return model.to(device).eval()


def complete_checkpoint(path: str | Path, verify: bool = False) -> Path:
    """The checkpoint `path` stands for: itself, or the newest complete one of a run's folder. Errors: `load_model`.

    Args:
        verify: compare checksums too; reads the whole checkpoint.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a run's folder or a checkpoint, such as runs/NAME")
    path = path.resolve()
    if path.is_dir() and path.suffix != ".ckpt" and not is_neutral(path) and not (path / "checkpoint").is_dir():
        found = newest_complete(path, verify)
        if found is None:
            folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
            halves = len([entry for entry in folder.glob("step=*") if entry.suffix in (".ckpt", ".neutral")])
            what = f"only half-written checkpoints ({halves})" if halves else "no checkpoint"
            raise FileNotFoundError(f"{folder} holds {what}: give the folder of a run that has saved one")
        return found
    if not (is_neutral(path) and not marker_of(path).exists() and "loops" not in NeutralCheckpoint(path).state):
        read_marker(path, verify)  # of other software a neutral one may have none
    return path


def check_trusted(path: Path, trust_pickle: bool) -> None:
    """ValueError for a folder of pickles that lies in no run's folder, unless it is said to be trusted."""
    in_run = path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").exists()
    if path.is_dir() and not is_neutral(path) and not trust_pickle and not in_run:
        raise ValueError(f"{path} is a folder of pickles, which can run any code when they are read, and lies in no "
                         "run's folder (config.yaml, checkpoints/): if you trust its origin, add --trust-pickle")


def checkpoint_step(path: str | Path) -> int:
    """Optimizer steps taken when the checkpoint was saved. Errors: `complete_checkpoint`."""
    path = complete_checkpoint(path)
    return int(NeutralCheckpoint(path).state["global_step"] if is_neutral(path) else read_marker(path)["step"])


def check_compatible(
    path: str | Path, model: LanguageModel, max_steps: int, data: Any = None, trust_pickle: bool = False
) -> None:
    """ValueError unless a run of `max_steps` steps of `model` can go on from the checkpoint: names what to change.

    The architecture must be the same, but for fields that change the speed alone (chunk_size, backend), the learning
    rate must go on where it was, AdamW's other settings must be the same (they are restored), and so must the data.

    Args:
        data: the run's data module; its own `load_state_dict` decides. None: not checked.
        trust_pickle: see `load_model`.
    """
    path = complete_checkpoint(path)
    content = _read(path, trust_pickle)
    saved = ModelConfig.from_dict(content["hyper_parameters"]["config"]).to_dict()
    wanted = model.config.to_dict()
    if wanted["vocab_size"] is None:  # to be taken from the data module
        wanted["vocab_size"] = saved["vocab_size"]
    fields = [name for name in wanted if wanted[name] != saved[name] and name not in _IMMATERIAL]
    if fields:
        raise ValueError(
            f"{path} is of another architecture: "
            + "; ".join(f"{name} is {saved[name]!r} there, {wanted[name]!r} here" for name in fields)
            + f". Set model.config.{fields[0]} to {saved[fields[0]]!r}, or start a new run"
        )
    if is_neutral(path):
        _check_tensors(NeutralCheckpoint(path))
    if "loops" not in content:
        return  # weights of other software: a run starts from them
    step, before = content["global_step"], OptimizerConfig.from_dict(content["hyper_parameters"]["optimizer"])
    here, there = (
        config.learning_rate * learning_rate_factor(config, step, steps)
        for config, steps in ((model.optimizer_config, max_steps), (before, content["max_steps"]))
    )
    if not math.isclose(here, there, rel_tol=1e-9, abs_tol=1e-15):
        raise ValueError(
            f"{path} goes on at step {step} with learning rate {there:.6g}, this configuration's schedule has "
            f"{here:.6g} there: resume with the learning_rate, schedule, warmup_steps and trainer.max_steps "
            f"({content['max_steps']}) it was trained with, or start a new run"
        )
    for name in ("weight_decay", "betas", "eps"):
        there, here = getattr(before, name), getattr(model.optimizer_config, name)
        if there != here:
            raise ValueError(f"{path} was trained with {name} {there}, this configuration has {here}: resume with "
                             f"model.optimizer.{name} {there}, or start a new run")
    if data is not None:
        check_data(path, data, trust_pickle)


def _check_tensors(neutral: NeutralCheckpoint) -> None:
    # ValueError unless its weights, and moments where it has any, are those of the architecture in its state.json.
    hyper = neutral.state["hyper_parameters"]
    with torch.device("meta"):
        model = LanguageModel(ModelConfig.from_dict(hyper["config"]), OptimizerConfig.from_dict(hyper["optimizer"]))
    wanted = {name: list(value.shape) for name, value in model.state_dict().items()}
    given = portable(neutral.shapes("weights"))
    for name in wanted | given:
        if given.get(name) != wanted.get(name):
            raise ValueError(
                f"{neutral.path} has weights of {name} of shape {given.get(name, 'none')}, the architecture in its "
                f"state.json (hyper_parameters.config) has {wanted.get(name, 'none')}: make {_field(name)} there those "
                "of the weights"
            )
    moments = neutral.names(MOMENTS[0])
    if missing := [name for name, _ in model.named_parameters() if moments and name not in moments]:
        raise ValueError(f"{neutral.path} has no {MOMENTS[0]} of {missing[0]}: AdamW needs those of every parameter, "
                         "or none to start anew")


def check_data(path: str | Path, data: Any, trust_pickle: bool = False) -> None:
    """ValueError unless the checkpoint was trained on what the data module hands out; its `load_state_dict` decides."""
    content, kind = _read(complete_checkpoint(path), trust_pickle), type(data).__qualname__
    if kind not in content:
        raise ValueError(f"{path} was not trained on data of {kind}: start a new run")
    data.load_state_dict(content[kind])


def load_weights(model: LanguageModel, weights: dict[str, torch.Tensor], source: str | Path) -> None:
    """Put `weights` into `model`. ValueError that names the first differing parameters and the fields to change."""
    weights = portable(weights)
    wanted = {name: list(value.shape) for name, value in model.state_dict().items()}
    given = {name: list(value.shape) for name, value in weights.items()}
    differing = [name for name in wanted | given if wanted.get(name) != given.get(name)]
    if differing:
        first = differing[:3]
        shown = [f"{name} is {given.get(name, 'missing')} there, {wanted.get(name, 'missing')} here" for name in first]
        fields = dict.fromkeys(_field(name) for name in first)
        raise ValueError(
            f"{source} is of another architecture, {len(differing)} parameters differ: {'; '.join(shown)}. "
            f"Make the model's {' and '.join(fields)} those of the checkpoint"
        )
    model.load_state_dict(weights)


def _read(path: Path, trust_pickle: bool = False) -> dict[str, Any]:
    # All of a checkpoint but its weights and moments.
    if is_neutral(path):
        return NeutralCheckpoint(path).content()
    check_trusted(path, trust_pickle)
    return read_content(path)


def _field(name: str) -> str:
    # The fields of ModelConfig that a parameter's presence and shape hang on.
    parts = {
        "positions": "style and max_positions", "embedding": "vocab_size and d_model", "head.": "tie_embeddings",
        "to_penalty": "mixer and u_source", "log_penalty": "learn_penalty", "to_beta": "mixer and beta",
        "to_decay": "mixer and decay", "log_rate": "mixer and decay", "decay_bias": "mixer and decay",
        "to_gate": "output_gate", "convolution": "conv_width", "out_norm": "readout", "feed_forward": "d_ff and style",
        "layers": "n_layers and d_model", "norm": "style and d_model",
    }  # fmt: skip
    return next((fields for part, fields in parts.items() if part in name), "mixer and style")
