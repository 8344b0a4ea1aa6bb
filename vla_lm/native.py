"""What Lightning and DeepSpeed wrote, read tensor by tensor: weights and AdamW's moments in float32, by parameter name.

A single file (`auto`, `ddp`) holds whole tensors. A ZeRO folder holds, for each rank, flat pieces; where a parameter
lies in them is said by what DeepSpeed saved beside them: `param_slice_mappings` under ZeRO-1 and 2 (its BF16_Optimizer
too), and the order of `param_shapes` under ZeRO-3, which DeepSpeed's own `GatheredTensor` reads. Files are mapped into
memory, so that a tensor at a time is read. DeepSpeed's `zero_to_fp32` gives weights alone, and refuses ZeRO-1 of
bfloat16 parameters; its `ds_to_universal` gives all, via a second folder of small pickles, and loses ZeRO-3's step.
"""

import functools
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_lm.checkpoint_files import beside, checksums, marker_of, publish, read_marker, remove, run_config, write_marker
from vla_lm.config import ModelConfig
from vla_lm.lanes import merged
from vla_lm.neutral import FORMAT, MOMENTS, own_names_alone, portable, save_tensors, write_tensors
from vla_lm.optimization import parameter_groups
from vla_lm.transformer import Transformer

# What of Lightning's dictionary a resume needs; beside it the data module's state, which has a fingerprint.
LANES = "lanes_rank_{}.pt"  # beside DeepSpeed's files
_KEPT = ("epoch", "global_step", "pytorch-lightning_version", "loops", "lr_schedulers", "hyper_parameters",
         "accumulation", "max_steps")


class NativeCheckpoint:
    """A checkpoint as a run wrote it.

    `content` is what is not a weight or a moment: counters, schedules, configuration. `weights` and `moments[kind]` map
    names to functions that read the float32 tensor; a parameter without a gradient so far has no moments.

    Args:
        path: the file or folder.

    Raises:
        ValueError: it cannot be read, or pieces of it are missing.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, read_content(path)
        self.weights: dict[str, Callable[[], Tensor]] = {}
        self.moments: dict[str, dict[str, Callable[[], Tensor]]] = {kind: {} for kind in MOMENTS}
        self.optimizer_step = self.content["global_step"]
        steps = self._open_folder() if path.is_dir() else self._open_file()
        if set(steps) - {self.optimizer_step}:
            raise ValueError(f"{path} was saved at step {self.optimizer_step}, its optimizer has taken "
                             f"{sorted(set(steps))} steps: use another checkpoint")

    def shapes(self) -> dict[str, list[int]]:
        """Shape of each parameter, from the configuration."""
        return {name: list(parameter.shape) for name, parameter in self._network().named_parameters("transformer")}

    def _network(self) -> Transformer:
        with torch.device("meta"):
            return Transformer(ModelConfig.from_dict(self.content["hyper_parameters"]["config"]))

    def _open_file(self) -> list[int]:
        for name, value in portable(self.content.pop("state_dict")).items():
            self.weights[name] = _reader(value)
        network = self._network()
        names = {parameter: name for name, parameter in network.named_parameters("transformer")}
        groups = parameter_groups(network, weight_decay=0.0)
        states = self.content.pop("optimizer_states")[0]["state"]
        for index, parameter in enumerate(itertools.chain(*(group["params"] for group in groups))):
            for kind in MOMENTS if index in states else ():
                self.moments[kind][names[parameter]] = _reader(states[index][kind])
        return [int(state["step"]) for state in states.values()]

    def _open_folder(self) -> list[int]:
        # Not DeepSpeed's get_optim_files, which takes a * in the run's name for a pattern.
        found = (self.path / "checkpoint").glob("*_optim_states.pt")
        files = sorted(found, key=lambda file: int(re.search(r"pp_rank_(\d+)", file.name)[1]))
        if not files:
            raise ValueError(f"{self.path} holds no optimizer states, which have a ZeRO run's weights: use another "
                             "checkpoint")
        load = functools.partial(torch.load, map_location="cpu", weights_only=False, mmap=True)
        ranks = [load(file)["optimizer_state_dict"] for file in files]
        count = ranks[0]["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if len(ranks) != count:
            raise ValueError(f"{self.path} has the pieces of {len(ranks)} ranks, {count} wrote it: use another one")
        for name in self.content.get("buffer_names", []):
            self.weights[name] = _reader(self.content["module"][name])
        steps = self._open_stage_3(ranks) if "fp32_flat_groups" in ranks[0] else self._open_stages_1_and_2(ranks)
        self.weights = portable(self.weights)
        self.moments = {kind: portable(readers) for kind, readers in self.moments.items()}
        return steps

    def _open_stages_1_and_2(self, ranks: list[dict[str, Any]]) -> list[int]:
        shapes = {name: shape for group in self.content["param_shapes"] for name, shape in group.items()}
        states = [rank["base_optimizer_state"]["state"] for rank in ranks]
        masters = [rank["single_partition_of_fp32_groups"] for rank in ranks]

        def flat(number: int, group: int, kind: str) -> Tensor:
            return masters[number][group] if kind == "weights" else states[number][group][kind]

        pieces: dict[str, list[tuple[int, int, Any]]] = {}
        for number, rank in enumerate(ranks):
            for group, places in enumerate(rank["param_slice_mappings"]):
                for name, place in places.items():
                    pieces.setdefault(name, []).append((number, group, place))
        for name, shape in shapes.items():
            def read(kind: str, parts: list = pieces[name], shape: torch.Size = shape) -> Tensor:
                cut = [flat(number, group, kind).detach()[place.start : place.start + place.numel]
                       for number, group, place in parts]
                return torch.cat(cut).float().view(shape)

            self.weights[name] = lambda read=read: read("weights")
            if all(group in states[number] for number, group, _ in pieces[name]):
                for kind in MOMENTS:
                    self.moments[kind][name] = lambda read=read, kind=kind: read(kind)
        return [int(state["step"]) for groups in states for state in groups.values()]

    def _open_stage_3(self, ranks: list[dict[str, Any]]) -> list[int]:
        from deepspeed.utils.zero_to_fp32 import GatheredTensor, zero3_partitioned_param_info

        states = [rank["optimizer_state_dict"]["state"] for rank in ranks]
        count = len(ranks[0]["fp32_flat_groups"])
        flats = {"weights": [rank["fp32_flat_groups"] for rank in ranks]}
        if all(group in state for state in states for group in range(count)):
            flats |= {kind: [[state[group][kind] for group in range(count)] for state in states] for kind in MOMENTS}
        starts = [0, *itertools.accumulate(flat.numel() for flat in ranks[0]["fp32_flat_groups"])]
        offset = 0
        for name, shape in itertools.chain(*(group.items() for group in self.content["param_shapes"])):
            numel, _ = zero3_partitioned_param_info(shape.numel(), len(ranks))
            for kind, flat in flats.items():
                gathered = GatheredTensor(flat, starts, offset, numel, shape)
                readers = self.weights if kind == "weights" else self.moments[kind]
                readers[name] = lambda gathered=gathered: gathered.contiguous().detach().float()
            offset += numel
        return [int(state["step"]) for groups in states for state in groups.values()]


def read_content(path: Path) -> dict[str, Any]:
    """The dictionary that Lightning made of a checkpoint, its tensors mapped; of a ZeRO folder without its weights.

    Raises:
        ValueError: not readable, or not a checkpoint of this project's model.
    """
    try:
        if path.is_dir():  # DeepSpeed pickles classes of its own beside plain values
            files = sorted((path / "checkpoint").glob("*model_states.pt"))
            if not files:
                raise FileNotFoundError("no checkpoint/*model_states.pt in it")
            content = torch.load(files[0], map_location="cpu", weights_only=False, mmap=True)
            content["lanes"] = lanes_of(path) or content.get("lanes", {})
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"{path} is no readable checkpoint ({type(error).__name__}: {error}): use another") from None
    hyper = content.get("hyper_parameters", {})
    if "config" not in hyper or "optimizer" not in hyper:
        raise ValueError(f"{path} holds no configuration of a language model: use a checkpoint of recipes.pretrain")
    return content


def lanes_of(path: Path) -> list[dict[str, Any]]:
    """Carried states in a ZeRO folder, of each rank what `LaneStates.own` gave, mapped; none in an older version's."""
    files = sorted((path / "checkpoint").glob(LANES.format("*")))
    return [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files]


def export(path: Path, out: Path | None = None, marks: dict[str, Any] | None = None) -> Path:
    """Writes the neutral form of a native checkpoint, on a CPU, a shard at a time; returns its folder.

    The run's config.yaml comes along, so that the export can be evaluated and gone on from wherever it lies. The marker
    says of which checkpoint it is ("source"). An export of the same one that is there already is verified and kept;
    where its bytes have changed, it is written anew.

    Args:
        path: a whole native checkpoint, whose pickles are trusted.
        out: folder to write; `step=N.neutral` beside the checkpoint when not given.
        marks: further entries of the completeness marker.

    Raises:
        ValueError: the checkpoint cannot be read, or `out` holds something else.
        OSError: it cannot be written; what was there is untouched, what was begun is removed.
    """
    source = NativeCheckpoint(path)
    out = out or path.with_name(f"{path.name.removesuffix('.ckpt')}.neutral")
    marks = {"step": source.optimizer_step, "source": _identity(path)} | (marks or {})
    if _is_there(out, path, marks):
        return out
    aside = beside(out, ".partial")
    if aside.exists() and not own_names_alone(aside):
        raise ValueError(f"{aside} is needed while {out} is written, and holds files that no export has written: move "
                         "it away, or give another folder")
    try:
        remove(aside)
        aside.mkdir(parents=True)
        _write(source, aside)
        publish(aside, out, marks)
    except OSError as error:
        remove(aside)
        raise OSError(error.errno, f"{out} could not be written ({error.strerror or error}), what was begun of it is "
                                   "removed: free some space, or choose another place") from error
    return out


def _identity(path: Path) -> str:
    # Tells one checkpoint from another: a digest of its files' checksums, which its marker knows.
    try:
        sums = read_marker(path).get("crc32")
    except ValueError:
        sums = None
    return hashlib.sha256(json.dumps(sums or checksums(path), sort_keys=True).encode()).hexdigest()


def _is_there(out: Path, path: Path, marks: dict[str, Any]) -> bool:
    """Whether `out` is a whole export of `path`; False: it may be written. ValueError where it holds something else."""
    if out.resolve() == path.resolve() or path.resolve() in out.resolve().parents:
        raise ValueError(f"{out} is the checkpoint to export itself, or lies in it: give another folder")
    if not out.exists() or out.is_dir() and not any(out.iterdir()):
        return False
    try:
        found = json.loads(marker_of(out).read_text())
        step, source, own = found["step"], found.get("source"), found.get("made_for", "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if "made_for" in marks and own_names_alone(out):
            return False  # beside its checkpoint: what was left where a removal was killed
        raise ValueError(f"{out} is there already and is no neutral checkpoint: give another folder, or move it "
                         "away") from None
    # What a resume made of a checkpoint that was saved anew since may go; what a person exported may not.
    if source != marks["source"] and own != marks.get("made_for"):
        of = f"another checkpoint, of step {step!r}" if source else f"a checkpoint of step {step!r} it does not name"
        raise ValueError(f"{out} holds the export of {of}, not that of {path} (step {marks['step']}): give another "
                         "folder, or move it away")
    try:
        read_marker(out, verify=True)
        whole = source == marks["source"]
    except ValueError:
        whole = False
    if whole and own and "made_for" not in marks:
        del found["made_for"]  # a person's from now on
        write_marker(out, found)
    if not whole and not own_names_alone(out):
        raise ValueError(f"{out} is a damaged export with other files beside its own: move it away, or give another "
                         "folder")
    return whole


def _write(source: NativeCheckpoint, aside: Path) -> None:
    """Writes all files but the marker."""
    state = {key: source.content[key] for key in _KEPT if key in source.content}
    state |= {key: value for key, value in source.content.items() if isinstance(value, dict) and "fingerprint" in value}
    state |= {"format": FORMAT, "callbacks": _plain(source.content.get("callbacks", {}))}
    parts = source.content.get("lanes") or []
    lanes = merged([parts] if isinstance(parts, dict) else parts)
    state["lanes"] = lanes.get("lanes", [])
    shapes = source.shapes()
    write_tensors(aside, "weights", source.weights, shapes)
    for kind in MOMENTS:
        zeros = {name: lambda shape=shape: torch.zeros(shape) for name, shape in shapes.items()}
        write_tensors(aside, kind, zeros | source.moments[kind], shapes)
    if lanes:
        save_tensors({f"{layer}.{name}": tensor for layer, named in enumerate(lanes["layers"])
                      for name, tensor in named.items()}, aside / "lanes.safetensors")
    if config := run_config(source.path):
        shutil.copyfile(config, aside / "config.yaml")
    (aside / "state.json").write_text(json.dumps(state, indent=1))


def _reader(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()  # 64-true stays exact


def _plain(states: dict[str, Any]) -> dict[str, Any]:
    # Callbacks' states that JSON can hold; another's (none of this project) starts anew.
    kept = {}
    for name, state in states.items():
        try:
            kept[name] = json.loads(json.dumps(state))
        except (TypeError, ValueError):
            pass
    return kept
