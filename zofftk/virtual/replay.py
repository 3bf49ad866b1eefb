"""A recorded micro-batch, run again on other parameters: a chain of one autograd function for each gradient.

It is one backward of autograd's, with its hooks and its accumulation, so an optimizer sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from zofftk.optimizer import OffloadOptimizer
from zofftk.ranks.slices import as_placed, local_of
from zofftk.virtual.device_memory import Storages
from zofftk.virtual.durations import Durations
from zofftk.virtual.events import BlockId, Event, Freed, Gradient, ParamId, Parts, Read, Spent, Taken
from zofftk.virtual.model_ops import ModelOps
from zofftk.virtual.program import BACKWARD, Spend


class ReplayProgram:
    """See the module.

    Args:
        parts: the events, see `events`.
        params: all trainable parameters, by name, on fake tensors.
        ids: what the events call them.
        fake, storages, durations, spend: as for `ModelProgram`.
    """

    def __init__(
        self,
        parts: Parts,
        params: Mapping[str, torch.Tensor],
        ids: Mapping[str, ParamId],
        fake: FakeTensorMode,
        storages: Storages,
        durations: Durations,
        spend: Spend,
    ) -> None:
        self.params = dict(params)
        self._by_id = {ids[name]: param for name, param in params.items()}
        self._fake, self._storages, self._spend = fake, storages, spend
        events = [event for of_part in parts.values() for event in of_part]
        forward, self._stretches, self._last = _split(events)
        self._forward = forward
        self._gradient_dtypes = {e.block: e.dtype for e in events if isinstance(e, Gradient)}
        self._blocks: dict[BlockId, int] = {}  # alive, counted alone
        self._tensors: dict[BlockId, torch.Tensor] = {}  # alive, of a gradient: flat
        for param in params.values():
            storages.leave_out(local_of(param))
        # What the optimizer does with a gradient takes time and memory like any other operation.
        self._ops = ModelOps(fake, storages, durations, lambda flops, ns: spend(BACKWARD, flops, ns))
        # What runs through the chain is on the meta device, which nobody counts.
        self._seed, self._seed_grad = torch.empty((), device="meta"), torch.empty((), device="meta")

    def micro_batch(self) -> None:
        with self._ops:
            self._run(self._forward)
            value: Any = self._seed
            for run, gradient in reversed(self._stretches):
                value = _Stretch.apply(value, self._by_id[gradient.param], self._backward_of(run, gradient))
            value.backward(self._seed_grad)
            self._run(self._last)

    def overlap(self, optimizer: OffloadOptimizer) -> None:
        """There are no modules to wait: parameters land where the events say that they are read."""
        optimizer.overlaps.add(self)

    def _run(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Spent):
                self._spend(event.phase, event.flops, event.ns)
            elif isinstance(event, Taken):
                self._take(event)
            elif isinstance(event, Freed):
                self._free(event.block)
            elif isinstance(event, Read) and (param := self._by_id.get(event.param)) is not None:
                param.detach()  # whoever waits for its value does so now

    def _take(self, event: Taken) -> None:
        dtype = self._gradient_dtypes.get(event.block)
        if dtype is None:
            self._blocks[event.block] = self._storages.memory.allocate(event.nbytes)
            return
        with _disable_current_modes(), self._fake:
            flat = self._tensors[event.block] = torch.empty(event.nbytes // dtype.itemsize, dtype=dtype)
        self._storages.add(flat)

    def _free(self, block: BlockId) -> None:
        if block in self._blocks:
            self._storages.memory.free(self._blocks.pop(block))
        else:
            del self._tensors[block]  # its memory goes when the last who holds the gradient lets go

    def _backward_of(self, run: Sequence[Event], gradient: Gradient) -> Callable[[], torch.Tensor]:
        def backward() -> torch.Tensor:
            self._run(run)
            flat = self._tensors[gradient.block]
            if (block := self._storages.block_of(flat)) is not None:
                self._storages.memory.mark_gradient(block)
            with _disable_current_modes():
                local = flat.as_strided(gradient.shape, gradient.strides, gradient.offset)
                return as_placed(self._by_id[gradient.param], local, gradient.placements)

        return backward


class _Stretch(torch.autograd.Function):
    """From one gradient to the next."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, param: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.run = run
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, ctx.run(), None


def _split(events: Sequence[Event]) -> tuple[list[Event], list[tuple[list[Event], Gradient]], list[Event]]:
    """Events of forward; those of backward up to each gradient; those after the last one."""
    forward: list[Event] = []
    stretches: list[tuple[list[Event], Gradient]] = []
    run = forward
    for event in events:
        if run is forward and isinstance(event, Spent) and event.phase == BACKWARD:
            run = []
        if isinstance(event, Gradient):
            stretches.append((run, event))
            run = []
        else:
            run.append(event)
    return forward, stretches, [] if run is forward else run
