"""A test mode that watches the model itself: its reads of parameters, and its writes into gradients.

The race clock sees what the engine does. What the model's own operations touch it cannot see; this mode looks at every
one of them, which makes a step about three times slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zofftk.device.clock import RaceError
from zofftk.optimizer import OffloadOptimizer
from zofftk.pending import is_pending


class CheckedAccess(TorchDispatchMode):
    """`with CheckedAccess(optimizer): ...` around forward, backward and step.

    Raises:
        RaceError: an operation reads a parameter whose new value has not landed, or writes into a gradient that the
            engine has taken and not packed yet; it names the operation and the parameter.
    """

    def __init__(self, optimizer: OffloadOptimizer) -> None:
        super().__init__()
        self._engine = optimizer._require_engine()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._engine.way_up.in_flight or self._engine.way_up.updated:
            self._check_reads(func, args, kwargs)
        if func._schema.is_mutable:
            self._check_writes(func, args, kwargs)
        return func(*args, **kwargs)

    def _check_reads(self, func: Any, args: Any, kwargs: Any) -> None:
        engine = self._engine
        way_up = engine.way_up
        updates = [*way_up.updated.values(), *(arrival.update for arrival in way_up.in_flight.values())]
        managed = [engine.managed[index] for update in updates for index in update.present]
        pending = {_storage(one.tensor): one.name for one in managed}
        for tensor in _tensors((args, kwargs)):
            if (name := pending.get(_storage(tensor))) is not None:
                raise RaceError(f"'{func}' of the model reads {name}, whose new value has not landed yet")

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        taken = [entry for bucket in self._engine.buckets for entry in bucket.waiting.items()] + self._engine.inbox
        waiting = {_storage(grad): self._engine.name(index) for index, grad in taken}
        values = [*args, *(kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :])]
        for argument, value in zip(func._schema.arguments, values, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in _tensors(value):
                if (name := waiting.get(_storage(tensor))) is not None:
                    raise RaceError(f"'{func}' of the model writes into the gradient of {name}, which is to be packed")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in _pytree.tree_leaves(tree)
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) or is_pending(leaf)
    ]


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # this look at a parameter must not land it
        return tensor.untyped_storage()._cdata
