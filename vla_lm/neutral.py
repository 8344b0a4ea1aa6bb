"""The neutral checkpoint: a run's state in safetensors and JSON, for every strategy and number of ranks.

    step=000500.neutral/
        weights.safetensors      float32, by the model's own parameter names (weights-00001-of-00003.safetensors and
        exp_avg.safetensors      weights.safetensors.index.json where they are larger than SHARD_BYTES)
        exp_avg_sq.safetensors   AdamW's moments, by the same names
        lanes.safetensors        where there are any: states that long documents carry on, in the global order of lanes
        state.json               everything else: steps, schedule, loops, data, model and optimizer configuration
        config.yaml              the run's configuration, where it has one
        complete.json            written last: step, bytes, checksums of the files above but config.yaml

A checkpoint of other software enters as weights.safetensors and a state.json with {"format": 1, "global_step": 0,
"hyper_parameters": {"config": {...}, "optimizer": {...}}}; training then starts at step 0 with its weights.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vla_lm.optimization import build_optimizer, schedule

FORMAT = 1
SHARD_BYTES = 2 * 10**9
MOMENTS = ("exp_avg", "exp_avg_sq")
_FLOATS = ("F32", "F64", "BF16", "F16")
_OWN = re.compile(r"(weights|exp_avg|exp_avg_sq|lanes)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|state\.json|"
                  r"config\.yaml|complete\.json(\.partial)?|\.tmp\w{6}")  # the last: safetensors', while it writes


class NeutralCheckpoint:
    """A neutral checkpoint, opened for reading tensor by tensor.

    `state` is what `state.json` holds, in Lightning's terms.

    Args:
        path: its folder.

    Raises:
        ValueError: a file is missing or is not what it should be; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.state = json.loads((path / "state.json").read_text())
            version, hyper, step = (self.state[key] for key in ("format", "hyper_parameters", "global_step"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path / 'state.json'} cannot be used ({type(error).__name__}: {error}): it must have "
                             "format, global_step and hyper_parameters, see vla_lm/README.md") from None
        if version != FORMAT:
            raise ValueError(f"{path} has format {version!r}, this version reads {FORMAT}: export it again")
        if type(step) is not int or step < 0:
            raise ValueError(f"{path / 'state.json'} has global_step {step!r}: it must be a whole number, "
                             "0 for weights of other software")
        if not isinstance(hyper, dict) or not all(isinstance(hyper.get(key), dict) for key in ("config", "optimizer")):
            raise ValueError(f"{path} holds no configuration of a language model: the hyper_parameters in its "
                             "state.json need config and optimizer, an object each")
        self._handles: dict[Path, Any] = {}
        self._known: dict[Path, set[str]] = {}
        self._places = {kind: self._index(kind) for kind in ("weights", *MOMENTS)}
        if not self._places["weights"]:
            raise ValueError(f"{path} has no weights.safetensors: use another checkpoint")
        shapes = self.shapes("weights")
        for kind, other in zip(MOMENTS, MOMENTS[::-1]):
            for name, shape in self.shapes(kind).items():
                if name not in self._places[other]:
                    raise ValueError(f"{path} has {kind} of {name} and no {other} of it: AdamW needs both, or none of "
                                     "any parameter to start anew")
                if shape != shapes.get(name):
                    raise ValueError(f"{path} has {kind} of {name} of shape {shape}, its weights have "
                                     f"{shapes.get(name, 'none')}: the shapes must be the same")

    def names(self, kind: str) -> list[str]:
        """Names of the tensors of a kind: weights, exp_avg or exp_avg_sq."""
        return list(self._places[kind])

    def shapes(self, kind: str) -> dict[str, list[int]]:
        """Shape of each tensor of a kind, from the files' headers."""
        return {name: self._open(file).get_slice(name).get_shape() for name, file in self._places[kind].items()}

    def tensor(self, kind: str, name: str) -> Tensor:
        """The tensor, float32 but in a checkpoint of 64-true. ValueError where it is missing."""
        if name not in self._places[kind]:
            raise ValueError(f"{self.path} has no {kind} of {name}: it is of another architecture")
        return self._open(self._places[kind][name]).get_tensor(name)

    def lanes(self) -> dict[str, Any]:
        """Carried states, as `LaneStates.load_state_dict` takes them; empty without."""
        if not self.state.get("lanes"):
            return {}
        layers: dict[int, dict[str, Tensor]] = {}
        file = self._open(self.path / "lanes.safetensors")
        for key in file.keys():
            layer, name = key.split(".", 1)
            layers.setdefault(int(layer), {})[name] = file.get_tensor(key)
        return {"lanes": self.state["lanes"], "layers": [layers[index] for index in sorted(layers)]}

    def content(self) -> dict[str, Any]:
        """Lightning's dictionary without weights and moments, and "neutral": where they are to be read from."""
        if self.state["global_step"] and "loops" not in self.state:
            raise ValueError(f"{self.path} is of other software and at step {self.state['global_step']}: "
                             "set global_step to 0 in its state.json, training then starts from its weights")
        defaults = {"lr_schedulers": [], "pytorch-lightning_version": pl.__version__}
        return {**defaults, **self.state, "lanes": self.lanes(), "neutral": str(self.path)}

    def optimizer_state(self, model: Any, max_steps: int) -> dict[str, Any]:
        """The state of `model`'s optimizer in a run of `max_steps` steps, as its `load_state_dict` takes it."""
        optimizer = build_optimizer(model.transformer, model.optimizer_config)
        names = {parameter: name for name, parameter in portable(dict(model.named_parameters())).items()}
        out = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        for group in out["param_groups"]:
            group |= {"lr": self.learning_rate(model, max_steps), "initial_lr": model.optimizer_config.learning_rate}
        if self.names(MOMENTS[0]):
            order = (parameter for group in optimizer.param_groups for parameter in group["params"])
            step = float(self.state["global_step"])
            for index, parameter in enumerate(order):
                moments = {kind: self.tensor(kind, names[parameter]) for kind in MOMENTS}
                out["state"][index] = {"step": torch.tensor(step), **moments}
        return out

    def learning_rate(self, model: Any, max_steps: int) -> float:
        """Learning rate of the next step: the schedule's, which depends on the step alone."""
        config = model.optimizer_config
        return config.learning_rate * schedule(config, max_steps)(self.state["global_step"])

    def _index(self, kind: str) -> dict[str, Path]:
        listed = self.path / f"{kind}.safetensors.index.json"
        file = self.path / f"{kind}.safetensors"
        if listed.exists():
            try:
                shards = json.loads(listed.read_text())["weight_map"]
                places = {name: self.path / shard for name, shard in shards.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{listed} cannot be used ({type(error).__name__}: {error}): it must be JSON with "
                                 "weight_map, the file of each tensor") from None
        else:
            places = dict.fromkeys(self._open(file).keys(), file) if file.exists() else {}
        for name, shard in places.items():
            if not shard.is_file() or name not in self._names(shard):
                raise ValueError(f"{listed} says that {name} is in {shard.name}, "
                                 f"{'which lacks it' if shard.is_file() else 'which is missing'}: copy the folder anew")
            if (dtype := self._open(shard).get_slice(name).get_dtype()) not in _FLOATS:
                raise ValueError(f"{shard} has {name} in {dtype}: it must be one of {', '.join(_FLOATS)}")
        return places

    def _names(self, file: Path) -> set[str]:
        if file not in self._known:
            self._known[file] = set(self._open(file).keys())
        return self._known[file]

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} is no readable safetensors file ({error}): use another checkpoint") from None
        return self._handles[file]


def portable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Parameter names without torch.compile's wrapper."""
    return {name.replace("_orig_mod.", ""): value for name, value in state_dict.items()}


def own_names_alone(folder: Path) -> bool:
    """Whether all in a folder has the name of a neutral checkpoint's file: nothing of a person's goes with it."""
    return folder.is_dir() and all(_OWN.fullmatch(file.name) and not file.is_dir() for file in folder.iterdir())


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """safetensors' `save_file`, with the mode of any other new file: it leaves its files readable to their owner alone.

    Raises:
        OSError: it cannot be written, with the system's number of what is wrong (safetensors has an error of its own).
    """
    file.touch()
    mode = file.stat().st_mode  # so, and not by os.umask, which other threads would see change
    try:
        save_file(tensors, file)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        told = (int(number[1]), os.strerror(int(number[1])), str(file)) if number else (str(error),)
        raise OSError(*told) from None
    file.chmod(mode)


def write_tensors(
    folder: Path, kind: str, readers: dict[str, Callable[[], Tensor]], shapes: dict[str, list[int]]
) -> None:
    """Writes the tensors of a kind, a shard at a time, by safetensors' convention for several files."""
    from huggingface_hub import split_state_dict_into_shards_factory

    sizes = {name: 4 * torch.Size(shapes[name]).numel() if name in shapes else 0 for name in readers}
    plan = split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda size: size, filename_pattern=kind + "{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )  # fmt: skip
    for file, names in plan.filename_to_tensors.items():
        save_tensors({name: readers[name]().contiguous() for name in names}, folder / file)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / f"{kind}.safetensors.index.json").write_text(json.dumps(index, indent=1))
