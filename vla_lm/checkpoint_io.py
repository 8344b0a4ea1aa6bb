"""Reads a checkpoint under any strategy, writes one while training goes on, loads the neutral form into ZeRO."""

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, distributed

from vla_lm.checkpoint_files import file_checksum, is_neutral, sync
from vla_lm.native import LANES, export, lanes_of, read_content
from vla_lm.neutral import MOMENTS, NeutralCheckpoint, portable
from vla_lm.snapshot import HostMemory, Snapshot

WAIT = 0.5  # seconds that training waits for a small save, then it goes on and the save in the background
LARGE = 100_000_000  # bytes that take longer to write than training should wait
FILE = {"form": "file"}  # the layout of a single-device or DDP checkpoint, at any number of ranks


class NoNeutralForm(ValueError):
    """A checkpoint of another strategy or number of ranks cannot be turned into the form that this run needs."""


class RunCheckpointIO(TorchCheckpointIO):
    """Lightning's reading and writing of checkpoints, and DeepSpeed's writing.

    What is saved within `deferred` is copied into host memory that is kept (`reserve` gets it beforehand), and written
    in a thread: `begin` starts it, `done` asks, `finish` waits. An error is raised by `finish` alone, so that a rank
    whose disk is full never leaves the others in the middle of a collective save. What others save is written at once.

    Args:
        background: False writes all at once, without a snapshot.
    """

    def __init__(self, background: bool = True) -> None:
        self.background = background
        self._memory, self._reserved, self._deferred = HostMemory(), False, False
        self._jobs: list[tuple[Any, Path]] = []
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self._checksums: dict[str, int] = {}

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Gets the host memory that a snapshot of these will need, while training goes on. Later calls do nothing."""
        if self.background and not self._reserved:
            self._reserved = True
            self._memory.reserve(tensors)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Around the saving of one checkpoint, whose files `finish` is to give the checksums of."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def guarded(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """The action, but within `deferred` its error is raised by `finish`: other ranks are in collectives."""

        def run(*args: Any, **options: Any) -> Any:
            try:
                return action(*args, **options)
            except (OSError, RuntimeError) as error:
                if not self._deferred:
                    raise
                self._problem = error

        return run

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.save(checkpoint, path)

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Takes the snapshot of a file to write; `torch.save`'s content, also of DeepSpeed's checkpoint engine."""
        if not self._deferred:
            return super().save_checkpoint(state_dict, path)
        path = Path(path)
        try:
            if self.background:
                self._jobs.append((Snapshot(self._memory).of(state_dict), path))
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            else:
                self._write(state_dict, path)
        except (OSError, RuntimeError) as error:
            self._problem = error

    def begin(self, wait: float | None) -> None:
        """Starts writing what was saved; waits for at most `wait` seconds, for what is large not at all.

        wait: null: until all is written.
        """
        if wait is not None and self._memory.lent > LARGE:
            wait = 0
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()
        self._thread.join(wait)

    def join(self, seconds: float) -> None:
        """Waits for the end of writing: a thread that still writes when Python ends would abort the process."""
        if self._thread is not None:
            self._thread.join(seconds)

    def done(self) -> bool:
        """Whether all is written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> dict[str, int]:
        """Waits for the end of writing; the checksums of this rank's files by path. Raises what writing raised."""
        if self._thread is not None:
            self._thread.join()
        problem, sums = self._problem, self._checksums
        self._thread, self._problem, self._checksums, self._jobs = None, None, {}, []
        self._memory.give_back()
        if problem is not None:
            raise problem
        return sums

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """A single file, or the neutral form of anything else (see `loadable`)."""
        path = loadable(Path(path), FILE)
        if is_neutral(path):
            return NeutralCheckpoint(path).content()
        return super().load_checkpoint(path, map_location="cpu", weights_only=True)

    def _write_all(self) -> None:
        try:
            for state, path in self._jobs:
                self._write(state, path)
        except Exception as error:  # of any kind: it is raised by finish
            self._problem = error

    def _write(self, state: Any, path: Path) -> None:
        torch.save(state, path)
        sync(path)
        self._checksums[str(path)] = file_checksum(path)


def loadable(path: Path, layout: Mapping[str, Any]) -> Path:
    """The checkpoint itself where its layout is the present one, otherwise its neutral form, made by rank 0 for all.

    Every rank calls it.

    Raises:
        NoNeutralForm: on every rank; the message says why.
        OSError: likewise, where the disk is full.
    """
    outcome: list[Any] = [path]
    if rank_zero_only.rank == 0 and not is_neutral(path):
        try:
            outcome = [_fitting(path, layout)]
        except Exception as error:  # of any kind: the other ranks wait for the outcome
            why = f"{path} cannot be turned into the neutral form, which this strategy and number of ranks need: "
            text = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            outcome = [OSError(error.errno, why + error.strerror) if full else NoNeutralForm(why + text)]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _fitting(path: Path, layout: Mapping[str, Any]) -> Path:
    saved = read_content(path).get("layout") if path.is_dir() else FILE
    if saved == layout:
        return path
    begun = time.monotonic()
    neutral = export(path, marks={"made_for": "resume"})
    print(f"{path.name} is {_words(saved)}, this run needs {_words(layout)}: going on from its neutral form, {neutral} "
          f"({time.monotonic() - begun:.1f} s)", flush=True)
    return neutral


def _words(layout: Mapping[str, Any] | None) -> str:
    if layout is None:
        return "an older version's"
    if layout == FILE:
        return "one file"
    weights = layout.get("weights", "other")
    return f"{layout['form']} of {layout['ranks']} ranks, {layout['optimizer']}, {weights} weights"


class AnyCheckpoint:
    """For a DeepSpeed strategy: its own folders where they fit, the neutral form of any other checkpoint.

    Where Lightning's saving is changed: no file is written between collectives that could fail on one rank alone
    (DeepSpeed's `latest` and its recovery script), the rest goes through `RunCheckpointIO`.
    """

    @property
    def layout(self) -> dict[str, Any]:
        """How the present engine's checkpoints are cut: what must agree with a folder's for it to be read directly."""
        engine = self.deepspeed_engine
        kind, weights = type(getattr(engine, "optimizer", None)).__name__, str(engine.get_data_types()[0])
        return {"form": f"zero{engine.zero_optimization_stage()}", "ranks": self.world_size, "optimizer": kind,
                "weights": weights.removeprefix("torch.")}  # DeepSpeed names its files by their dtype

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        engine, path = self.deepspeed_engine, self.broadcast(filepath)
        if isinstance(self.checkpoint_io, RunCheckpointIO):
            engine.checkpoint_engine.save = self.checkpoint_io.save
            for name in ("_save_checkpoint", "_save_zero_checkpoint"):  # what a rank does between two collectives
                setattr(engine, name, self.checkpoint_io.guarded(partial(getattr(type(engine), name), engine)))
        engine._copy_recovery_script = lambda save_path: None
        own = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        engine.save_checkpoint(str(path), client_state=own, tag="checkpoint", save_latest=False)
        # Not among what Lightning saves: ZeRO-3 writes that on every rank, and a rank trains its own lanes alone.
        held = getattr(self.lightning_module, "lanes", None)
        if held is not None and (lanes := held.own()):
            file = Path(path) / "checkpoint" / LANES.format(f"{self.global_rank:05d}")
            self.checkpoint_io.save_checkpoint(lanes, file)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = loadable(Path(checkpoint_path), self.layout)
        if is_neutral(path):
            module = self.lightning_module
            return load_sharded(self.deepspeed_engine, NeutralCheckpoint(path), module, module.trainer.max_steps)
        _, content = self.deepspeed_engine.load_checkpoint(str(path), tag="checkpoint", load_lr_scheduler_states=False)
        content["lanes"] = lanes_of(path) or content.get("lanes", {})
        return content


def load_sharded(engine: Any, neutral: NeutralCheckpoint, module: Any, max_steps: int) -> dict[str, Any]:
    """Sets a fresh DeepSpeed engine's float32 masters, moments, steps and learning rates; Lightning's dictionary.

    Every rank reads one parameter after the other and keeps its piece.

    Args:
        module: the language model in the engine.
        max_steps: optimizer steps of the whole run.
    """
    from deepspeed.utils import (safe_set_full_fp32_param, safe_set_full_optimizer_state, safe_set_local_fp32_param,
                                 safe_set_local_optimizer_state)

    content, optimizer = neutral.content(), engine.optimizer
    base, step, sharded = optimizer.optimizer, content["global_step"], engine.zero_optimization_stage() == 3
    flats = optimizer.fp32_partitioned_groups_flat if sharded else [group["params"][0] for group in base.param_groups]
    kinds = [kind for kind in MOMENTS if neutral.names(kind)]
    if sharded:
        optimizer.checkpoint_event_prologue()
    for flat in flats if kinds else ():  # DeepSpeed makes them in the first step otherwise
        on_device = base.defaults.get("fused") or base.defaults.get("capturable")
        steps = torch.tensor(float(step), device=flat.device if on_device else "cpu")
        base.state[flat] = {"step": steps} | {kind: torch.zeros_like(flat, requires_grad=False) for kind in MOMENTS}
    if kinds and not sharded:
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in portable(dict(module.named_parameters())).items():
        for kind in ("weights", *kinds):
            value = neutral.tensor(kind, name)
            if sharded:
                # DeepSpeed's own setter of whole values fails where the last rank's piece is padded.
                count, rank = parameter.ds_tensor.numel(), distributed.get_rank()
                value = value.flatten()[rank * count : (rank + 1) * count]
                value = torch.nn.functional.pad(value, (0, count - value.numel()))
            setter = {True: (safe_set_local_fp32_param, safe_set_local_optimizer_state),
                      False: (safe_set_full_fp32_param, safe_set_full_optimizer_state)}[sharded]
            setter[0](parameter, value) if kind == "weights" else setter[1](parameter, value, kind)
    for name, buffer in portable(dict(module.named_buffers())).items():
        if name in neutral.names("weights"):
            buffer.copy_(neutral.tensor("weights", name))
    if sharded:  # its own way to renew the working copies from the masters is to load a state: here the one it has
        optimizer.load_state_dict([optimizer.state_dict()] * distributed.get_world_size())
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()
    for group in base.param_groups:
        group["lr"] = neutral.learning_rate(module, max_steps)
    engine.global_steps = step
    return content
