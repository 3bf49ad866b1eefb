"""What goes into a checkpoint of many ranks, and what goes out of one: values in dicts and lists of their own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from zofftk.saving import check_plain


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
