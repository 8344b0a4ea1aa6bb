"""States that a long document carries from one batch to the next, kept by the global index of its lane."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import State
from vla_lm.state import LayerState


class LaneStates:
    """The last state of every row of the optimizer step ("lane") that this rank trains.

    A lane's number is the same at any number of ranks, so a checkpoint restores at another world size.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], list[LayerState]] = {}  # lanes of one micro-batch -> states, one per layer
        self._restored: tuple[list[int], list[LayerState]] | None = None

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
        self._restored = None

    def state_dict(self) -> dict:
        """Lanes of all ranks: {"lanes": [int], "layers": [{name: tensor with one row per lane}]}; empty without states.

        With several ranks every rank must call it, with equally many lanes.
        """
        lanes = [lane for key in self._groups for lane in key]
        groups = list(self._groups.values())
        if not groups:
            if self._restored is None:
                return {}
            lanes, restored = self._restored
            return {"lanes": lanes, "layers": [state.tensors() for state in restored]}
        layers = []
        for layer in range(len(groups[0])):
            named = [group[layer].tensors() for group in groups]
            layers.append({name: _from_all_ranks(torch.cat([part[name] for part in named])) for name in named[0]})
        where = next(iter(groups[0][0].tensors().values())).device
        return {"lanes": _from_all_ranks(torch.tensor(lanes, device=where)).tolist(), "layers": layers}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` gave, at any number of ranks."""
        self._groups = {}
        self._restored = (state["lanes"], [_layer_state(layer) for layer in state["layers"]]) if state else None

    def _find(self, lanes: tuple[int, ...]):
        places = {}
        if self._restored is not None:
            places = {lane: (self._restored[1], row) for row, lane in enumerate(self._restored[0])}
        for key, states in self._groups.items():
            places.update({lane: (states, row) for row, lane in enumerate(key)})
        return [places.get(lane) for lane in lanes]


def _tensors(state: LayerState, row: int) -> dict[str, Tensor]:
    return {name: tensor[row : row + 1] for name, tensor in state.tensors().items()}


def _layer_state(named: dict[str, Tensor]) -> LayerState:
    memory = {name.removeprefix("memory."): tensor for name, tensor in named.items() if name.startswith("memory.")}
    return LayerState(memory=State(**memory), tail=named.get("tail"), length=named["length"])


def _from_all_ranks(tensor: Tensor) -> Tensor:
    # [n, ...] on each rank -> [world * n, ...] on the host of each
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return tensor.cpu()
    out = tensor.new_empty(torch.distributed.get_world_size() * tensor.shape[0], *tensor.shape[1:])
    torch.distributed.all_gather_into_tensor(out, tensor.contiguous())
    return out.cpu()
