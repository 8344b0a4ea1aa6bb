"""Load a trained model from a run's folder, a checkpoint file or a DeepSpeed folder; check one before a resume."""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from vla_lm.config import ModelConfig, OptimizerConfig
from vla_lm.module import LanguageModel, portable
from vla_lm.optimization import learning_rate_factor

_STEP = re.compile(r"step=(\d+)")
# Fields of ModelConfig that change how, not what, is computed.
_IMMATERIAL = {"chunk_size", "backend", "init_std", "activation_checkpointing"}


def load_model(path: str | Path, device: str | torch.device = "cpu") -> LanguageModel:
    """The model of a checkpoint, in evaluation mode, its weights in float32.

    Args:
        path: a run's folder (its newest complete checkpoint), or a checkpoint (`step=000500.ckpt`: a file, or
            DeepSpeed's folder) with its `.complete` marker beside it.
        device: where to put the model; "auto": a GPU where there is one.

    Raises:
        FileNotFoundError: no such path, or no complete checkpoint in the run's folder.
        ValueError: half-written, not of this project, or its weights do not fit its configuration.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used ({str(error).splitlines()[0]}): use auto or cpu") from None
    path = complete_checkpoint(path)
    content = _read(path)
    hyper = content["hyper_parameters"]
    model = LanguageModel(ModelConfig.from_dict(hyper["config"]), OptimizerConfig.from_dict(hyper["optimizer"]))
    load_weights(model, _full_weights(path, content), path)
    return model.to(device).eval()


def complete_checkpoint(path: str | Path) -> Path:
    """The checkpoint `path` stands for: itself, or the newest complete one of a run's folder. Errors: `load_model`."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a run's folder or a checkpoint, such as runs/NAME")
    path = path.resolve()
    if path.is_dir() and path.suffix != ".ckpt" and not _is_sharded(path):
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = [entry for entry in folder.glob("step=*.ckpt") if _STEP.match(entry.name)]
        complete = [entry for entry in found if _damage(entry) is None]
        if not complete:
            what = f"only half-written checkpoints ({len(found)})" if found else "no checkpoint"
            raise FileNotFoundError(f"{folder} holds {what}: give the folder of a run that has saved one")
        return max(complete, key=_step)
    damage = _damage(path)
    if damage:
        raise ValueError(
            f"{path} {damage}: use an older checkpoint, or the run's folder, which picks the newest complete one "
            f"(a copied checkpoint needs a copy of its marker)"
        )
    return path


def checkpoint_step(path: str | Path) -> int:
    """Optimizer steps taken when the checkpoint was saved, from its marker. Errors: `complete_checkpoint`."""
    return int(json.loads(_marker(complete_checkpoint(path)).read_text())["step"])


def check_compatible(path: str | Path, model: LanguageModel, max_steps: int, data: Any = None) -> None:
    """ValueError unless a run of `max_steps` steps of `model` can go on from the checkpoint: names the fields to change.

    The architecture must be the same, but for fields that change the speed alone (chunk_size, backend), the learning
    rate must go on where it was, AdamW's other settings must be the same (they are restored), and so must the data.

    Args:
        data: the run's data module; its own `load_state_dict` decides. None: not checked.
    """
    path = complete_checkpoint(path)
    content = _read(path)
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
    step, before = content["global_step"], OptimizerConfig.from_dict(content["hyper_parameters"]["optimizer"])
    here, there = (
        config.learning_rate * learning_rate_factor(config, step, steps)
        for config, steps in ((model.optimizer_config, max_steps), (before, content["max_steps"]))
    )
    if not math.isclose(here, there, rel_tol=1e-9, abs_tol=1e-15):
        raise ValueError(
            f"{path} goes on at step {step} with learning rate {there:.6g}, this configuration's schedule has {here:.6g} there: "
            f"resume with the learning_rate, schedule, warmup_steps and trainer.max_steps ({content['max_steps']}) it was "
            "trained with, or start a new run"
        )
    for name in ("weight_decay", "betas", "eps"):
        there, here = getattr(before, name), getattr(model.optimizer_config, name)
        if there != here:
            raise ValueError(f"{path} was trained with {name} {there}, this configuration has {here}: resume with "
                             f"model.optimizer.{name} {there}, or start a new run")
    if data is not None:
        check_data(path, data)


def check_data(path: str | Path, data: Any) -> None:
    """ValueError unless the checkpoint was trained on what the data module hands out; its `load_state_dict` decides."""
    content, kind = _read(complete_checkpoint(path)), type(data).__qualname__
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


def _read(path: Path) -> dict[str, Any]:
    # The checkpoint without a ZeRO run's weights, which lie in pieces.
    try:
        if path.is_dir():
            # DeepSpeed pickles classes of its own beside plain values.
            content = torch.load(_rank_files(path)[0], map_location="cpu", weights_only=False)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"{path} is no readable checkpoint ({type(error).__name__}: {error}): use another") from None
    hyper = content.get("hyper_parameters", {})
    if "config" not in hyper or "optimizer" not in hyper:
        raise ValueError(f"{path} holds no configuration of a language model: use a checkpoint of recipes.pretrain")
    return content


def _full_weights(path: Path, content: dict[str, Any]) -> dict[str, torch.Tensor]:
    if not path.is_dir():
        return content["state_dict"]
    pieces = sorted((path / "checkpoint").glob("*_optim_states.pt"), key=_rank)
    if not pieces:
        raise ValueError(f"{path} holds no optimizer states, which have a ZeRO run's weights: use another checkpoint")
    if "zero_stage" in torch.load(pieces[0], map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(str(path), tag="checkpoint")
    # ZeRO-1 of bfloat16 parameters: DeepSpeed's own converter refuses it. Each parameter group is one float32 vector,
    # cut evenly over the ranks.
    ranks = [torch.load(piece, map_location="cpu", weights_only=False)["optimizer_state_dict"] for piece in pieces]
    if len(ranks) != max(ranks[0]["partition_count"]):
        raise ValueError(f"{path} has the pieces of {len(ranks)} ranks, {max(ranks[0]['partition_count'])} wrote it")
    weights = {}
    for group, shapes in enumerate(content["param_shapes"]):
        flat = torch.cat([rank["single_partition_of_fp32_groups"][group].detach() for rank in ranks])
        sizes = [shape.numel() for shape in shapes.values()]
        parts = flat[: sum(sizes)].split(sizes)
        weights |= {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}
    return weights


def _rank(path: Path) -> int:
    return int(re.search(r"pp_rank_(\d+)", path.name)[1])


def _rank_files(path: Path) -> list[Path]:
    files = sorted((path / "checkpoint").glob("*model_states.pt"))
    if not files:
        raise FileNotFoundError("no checkpoint/*model_states.pt in it")
    return files


def _is_sharded(path: Path) -> bool:
    return (path / "checkpoint").is_dir()


def _step(path: Path) -> int:
    return int(_STEP.match(path.name)[1])


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".complete")


def _damage(path: Path) -> str | None:
    # What is wrong with a checkpoint's marker or size, if anything.
    try:
        expected = json.loads(_marker(path).read_text())["bytes"]
    except FileNotFoundError:
        return f"has no marker {_marker(path).name} beside it, so it was not written to its end"
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"has an unreadable marker {_marker(path).name}"
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    found = sum(file.stat().st_size for file in files)
    return None if found == expected else f"has {found} bytes, its marker says {expected}"


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
