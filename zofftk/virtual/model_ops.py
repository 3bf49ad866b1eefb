"""The model's own work in a dry run: every operation of torch on fake tensors takes its time and its memory.

While the mode is on, operations run under torch's fake mode; those on tensors that are not the model's go past it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zofftk.virtual.device_memory import Storages
from zofftk.virtual.durations import Durations
from zofftk.virtual.op_costs import cost_of, exchanged_bytes, tensors_in

_ASKS_DEVICE = torch.ops.prim.device.default

Spend = Callable[[int, int], None]  # flops and nanoseconds


class ModelOps(TorchDispatchMode):
    """`spend` is told of each operation that takes time, `reads` of each tensor that is read, before it is."""

    def __init__(
        self,
        fake: FakeTensorMode,
        storages: Storages,
        durations: Durations,
        spend: Spend,
        reads: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._fake = fake
        self._storages = storages
        self._durations = durations
        self._spend = spend
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ASKS_DEVICE:
            return args[0].fake_device
        if self._is_foreign(args, kwargs):
            return func(*args, **kwargs)
        if any(not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a stand-in answers for itself, and what it asks for comes here again
        with self._fake:
            out = func(*args, **kwargs)
        self._count(func, args, kwargs, out)
        return out

    def _is_foreign(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """On the engine's own buffers; or on what torch tries out, as DTensor does to learn an operation's shapes."""
        if args and isinstance(args[0], torch.Tensor):
            return args[0].is_meta if type(args[0]) is torch.Tensor else self._is_of_others(args[0])
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            return True
        return any(self._is_of_others(tensor) for tensor in tensors_in(args, FakeTensor))

    def _is_of_others(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is not self._fake

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        read, made = list(tensors_in((args, kwargs), FakeTensor)), list(tensors_in(out, FakeTensor))
        if self._reads is not None:
            for tensor in read:
                self._reads(tensor)
        is_new = [self._storages.add(tensor) for tensor in made]
        if not any(is_new) and not func._schema.is_mutable:
            return  # a view
        if (nbytes := exchanged_bytes(func, read, made)) is not None:
            self._spend(0, self._durations.slices_ns(nbytes))
            return
        cost = cost_of(func, args, kwargs, out, [*read, *made])
        if cost is None:
            return
        if cost.flops:
            duration_ns = self._durations.compute_ns(
                cost.flops, cost.elements, cost.nbytes, wide=cost.wide, is_attention=cost.is_attention
            )
        else:
            duration_ns = self._durations.move_ns(cost.nbytes)
        self._spend(cost.flops, duration_ns)
