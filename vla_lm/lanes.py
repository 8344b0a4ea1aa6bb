"""States that a long document carries from one batch to the next, kept by the global index of its lane."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, distributed

from kernels import State
from vla_lm.state import LayerState


class LaneStates:
    """The last state of every row of the optimizer step ("lane") that this rank trains.

    A lane's number is the same at any number of ranks, so a checkpoint restores at another world size.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], list[LayerState]] = {}  # lanes of one micro-batch -> states, one per layer
        self._restored: list[dict] = []

    def get(self, lanes: Sequence[int], device: torch.device) -> tuple[list[LayerState] | None, list[bool]]:
        """States of `lanes`, one row each, and which lanes have one; rows without are arbitrary. None: no lane has."""
        key = tuple(lanes)
        if key in self._groups:
            return self._groups[key], [True] * len(key)
        found = self._find(key)
        if not any(found):
            return None, [False] * len(key)
        filler = next(place for place in found if place)
        rows = [place or filler for place in found]
        states = []
        for layer in range(len(filler[0])):
            pieces = [_tensors(group[layer], row) for group, row in rows]
            states.append(_layer_state({n: torch.cat([p[n] for p in pieces]).to(device) for n in pieces[0]}))
        return states, [place is not None for place in found]

    def put(self, lanes: Sequence[int], states: list[LayerState]) -> None:
        """Keep `states` (one per layer, one row per lane), cut from the graph."""
        self._groups[tuple(lanes)] = [state.detach() for state in states]

    def end_step(self) -> None:
        """An optimizer step is over: every lane of this rank has been put, what was restored is out of date."""
        self._restored = []

    def own(self) -> dict:
        """This rank's lanes: {"lanes": [int], "layers": [{name: tensor with one row per lane}]}; empty without states.

        What was restored and not trained on since is the first rank's.
        """
        groups = list(self._groups.values())
        if not groups:
            return merged(self._restored) if rank_zero_only.rank == 0 else {}
        layers = []
        for layer in range(len(groups[0])):
            named = [group[layer].tensors() for group in groups]
            layers.append({name: torch.cat([part[name] for part in named]) for name in named[0]})
        return {"lanes": [lane for key in self._groups for lane in key], "layers": layers}

    def state_dict(self) -> dict:
        """Lanes of all ranks, as `own`, on the first; empty on the others.

        Every rank must call it, with equally many lanes. RuntimeError on all where one has no memory for it.
        """
        if not self._groups or not distributed.is_available() or not distributed.is_initialized():
            return self.own()
        where = next(iter(self._groups.values()))[0].length.device
        own = _on_all(self.own, where)
        layers = [{name: _on_first_rank(tensor) for name, tensor in layer.items()} for layer in own["layers"]]
        lanes = _on_first_rank(torch.tensor(own["lanes"], device=where)).tolist()
        return {"lanes": lanes, "layers": layers} if lanes else {}

    def load_state_dict(self, *parts: dict) -> None:
        """Restore what `state_dict` gave, or what `own` gave on each rank, at any number of ranks.

        A tensor is read where one of its lanes is trained: those of a mapped file stay there until then.
        """
        self._groups, self._restored = {}, [part for part in parts if part]

    def _find(self, lanes: tuple[int, ...]):
        places = {}
        for part in self._restored:
            layers = [_layer_state(layer) for layer in part["layers"]]
            places.update({lane: (layers, row) for row, lane in enumerate(part["lanes"])})
        for key, states in self._groups.items():
            places.update({lane: (states, row) for row, lane in enumerate(key)})
        return [places.get(lane) for lane in lanes]


def _tensors(state: LayerState, row: int) -> dict[str, Tensor]:
    return {name: tensor[row : row + 1] for name, tensor in state.tensors().items()}


def _layer_state(named: dict[str, Tensor]) -> LayerState:
    memory = {name.removeprefix("memory."): tensor for name, tensor in named.items() if name.startswith("memory.")}
    return LayerState(memory=State(**memory), tail=named.get("tail"), length=named["length"])


def merged(parts: Sequence[dict]) -> dict:
    """One of several that `LaneStates.own` gave, its lanes in order; empty without."""
    order = sorted((lane, number, row) for number, part in enumerate(parts) for row, lane in enumerate(part["lanes"]))
    if not order:
        return {}
    starts = [0, *accumulate(len(part["lanes"]) for part in parts)]
    rows = torch.tensor([starts[number] + row for _, number, row in order])
    layers = [{name: torch.cat([layer[name] for layer in layers]).index_select(0, rows) for name in layers[0]}
              for layers in zip(*(part["layers"] for part in parts))]
    return {"lanes": [lane for lane, _, _ in order], "layers": layers}


def _on_first_rank(tensor: Tensor) -> Tensor:
    # [n, ...] on each rank -> [world * n, ...] on the host of the first, [0, ...] on the others
    first = distributed.get_rank() == 0
    world = distributed.get_world_size()
    out = _on_all(lambda: [torch.empty_like(tensor) for _ in range(world)] if first else None, tensor.device)
    distributed.gather(tensor.contiguous(), out, dst=0)
    return torch.cat(out).cpu() if first else tensor[:0]


def _on_all(action: Callable[[], Any], device: torch.device) -> Any:
    """What the action gives; a RuntimeError, as of a full GPU, on one rank is one on all: none waits for another."""
    problem, result = None, None
    try:
        result = action()
    except RuntimeError as error:
        problem = error
    failed = torch.tensor(float(problem is not None), device=device)
    distributed.all_reduce(failed)
    if failed:
        raise problem or RuntimeError("another rank could not gather the states that its documents carry")
    return result
