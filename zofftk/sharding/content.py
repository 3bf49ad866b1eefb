"""What goes into a checkpoint of many ranks: which values, and whether the ranks hold each element once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from zofftk.errors import InputError
from zofftk.saving import check_plain
from zofftk.sharding.state import ShardedState


def resolved(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with the state dicts of the objects in it."""
    if not isinstance(state, dict):
        raise TypeError(f"expected a dict of state dicts and plain values, got {type(state).__name__}")
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def loadable(state: dict[str, Any]) -> dict[str, Any]:
    """The same, of optimizers also the states that there are only from the first step on."""
    shown = {key: value.show_states() for key, value in state.items() if hasattr(value, "show_states")}
    return resolved(state | shown)


def saveable(state: dict[str, Any], *, copied: bool) -> dict[str, Any]:
    """What is to be saved of `state`, in dicts and lists of its own; `copied`, with tensors of its own on the CPU.

    Raises TypeError, which names the keys, for what `load_sharded` would refuse.
    """
    return _saveable(resolved(state), "state", copied)


def _saveable(value: Any, where: str, copied: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            raise TypeError(f"cannot save {where}, a tensor on the meta device, which has no values")
        value = value.detach()
        return value.to("cpu", copy=True) if copied else value
    if isinstance(value, Mapping):
        return {key: _saveable(item, f"{where}[{key!r}]", copied) for key, item in value.items()}
    if isinstance(value, list):
        return [_saveable(item, f"{where}[{number}]", copied) for number, item in enumerate(value)]
    check_plain(value, where)
    return copy.deepcopy(value) if copied else value


@dataclass(frozen=True)
class Wanted:
    """What one rank wants to save: torch's plan, and the shapes of the sharded states, of which it may hold nothing."""

    plan: SavePlan
    shapes: dict[str, torch.Size]


def wanted(plan: SavePlan, flat: dict[str, Any]) -> Wanted:
    return Wanted(plan, {name: value.shape for name, value in flat.items() if isinstance(value, ShardedState)})


def check_held(by_rank: list[Wanted]) -> None:
    """Raises InputError where the ranks do not hold each element of a tensor once.

    Torch checks it on several ranks, and not on one, where a load would leave what is missing as it was; and a tensor
    of which no rank holds anything would not be saved.
    """
    shapes: dict[str, torch.Size] = {}
    boxes: dict[str, set[tuple[Any, Any]]] = {}
    for wanted in by_rank:
        for name, shape in wanted.shapes.items():
            if shapes.setdefault(name, shape) != shape:
                raise InputError(f"{name} has shape {tuple(shapes[name])} on one rank, {tuple(shape)} on another")
        for item in wanted.plan.items:
            if item.type == WriteItemType.SHARD and item.tensor_data is not None:
                shapes.setdefault(item.index.fqn, item.tensor_data.size)
                chunk = item.tensor_data.chunk
                boxes.setdefault(item.index.fqn, set()).add((chunk.offsets, chunk.sizes))
    for name, shape in shapes.items():
        held = sum(prod(sizes) for _, sizes in boxes.get(name, ()))
        if held != shape.numel():
            raise InputError(f"the ranks hold {held} elements of {name}, expected each of its {shape.numel()} once")
