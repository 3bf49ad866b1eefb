"""What is in `p.grad` of each parameter: its hook, its stand-in, and what to make of anything else that is there."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from zofftk import hooks
from zofftk.engine import Engine
from zofftk.managed import Gathered, Managed
from zofftk.standin import StandIn, StandInError
from zofftk.validation import check_gradient


class StandIns:
    """The hooks and stand-ins of an engine's parameters, by index."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._all: list[StandIn] = []
        self.hooks: dict[int, RemovableHandle] = {}
        engine.renew = _renewer(self)

    def add(self, managed: Managed) -> None:
        assert managed.index == len(self._all)
        self._all.append(self._new(managed))

    def attach(self, managed: Managed) -> None:
        """Take the gradients of a parameter from now on, if it has any."""
        if managed.tensor.requires_grad and managed.index not in self.hooks:
            hook = hooks.attach(self._engine, managed.index, managed.tensor, self._all)
            self.hooks[managed.index] = hook

    def __getitem__(self, index: int) -> StandIn:
        return self._all[index]

    def _new(self, managed: Managed) -> StandIn:
        param = managed.tensor
        if param.dtype == torch.float16 and hasattr(param, "grad_dtype"):
            # A GradScaler refuses to unscale fp16 gradients, which could overflow; the engine scales in fp32.
            param.grad_dtype = None
            return StandIn(self._engine, managed.index, param, torch.float32)
        return StandIn(self._engine, managed.index, param, param.dtype)

    def renew(self, index: int) -> None:
        """What the stand-in stood for was dropped: whoever has kept it must not mistake it for the next gradient."""
        managed, old = self._engine.managed[index], self._all[index]
        new = self._all[index] = self._new(managed)
        if managed.tensor.grad is old:
            managed.tensor.grad = new
        old.index = -1

    def renew_if_kept(self, index: int) -> None:
        """After its step: the next gradient gets another stand-in if somebody beside us has kept this one."""
        self._engine.managed[index].tensor.grad = None
        if sys.getrefcount(self._all[index]) > 2:  # the list, and the argument
            self.renew(index)

    def put(self, index: int) -> None:
        """The engine has a gradient of this parameter that did not come by the hook."""
        self._engine.managed[index].tensor.grad = self._all[index]

    def collect(self, managed: Managed) -> None:
        """Make the engine's view agree with `p.grad`: a dropped one is forgotten, one set by hand is taken."""
        grad = managed.tensor.grad
        if grad is None:
            if managed.gathered is Gathered.LIVE:
                self._engine.forget(managed.index)
                self.renew(managed.index)
        elif grad is self._all[managed.index]:
            if managed.gathered is Gathered.SPENT:
                raise RuntimeError(
                    f"step() has no gradient for {managed.name}: the last one was used by the step before. "
                    "Call zero_grad() after each step"
                )
        elif isinstance(grad, StandIn):
            if grad.index >= 0:
                raise grad.refuse("step()")
            raise StandInError(
                f"p.grad of {managed.name} was put aside and then replaced by another backward's: it is gone"
            )
        else:
            check_gradient(grad, managed.name)
            if self._engine.take(managed.index, managed.to_slice(grad).resolve_neg()):
                self.renew(managed.index)

    def move(self, managed: Managed, new: torch.Tensor) -> None:
        """`new` takes the place of the parameter, with a hook and a stand-in of its own."""
        self.hooks.pop(managed.index).remove()
        self._clear(managed)
        managed.tensor = new
        self.renew(managed.index)
        self.attach(managed)

    def release(self) -> None:
        """Leave the parameters as if there had never been an optimizer."""
        for hook in self.hooks.values():
            hook.remove()
        for managed in self._engine.managed:
            self._clear(managed)

    def _clear(self, managed: Managed) -> None:
        param = managed.tensor
        if param.grad is self._all[managed.index]:
            param.grad = None
        is_free = param.grad is None or param.grad.dtype == torch.float16
        if param.dtype == torch.float16 and is_free and hasattr(param, "grad_dtype"):
            param.grad_dtype = torch.float16


def _renewer(stand_ins: StandIns) -> Callable[[int], None]:
    """`renew` without keeping the optimizer alive."""
    reference = weakref.ref(stand_ins)

    def renew(index: int) -> None:
        if (alive := reference()) is not None:
            alive.renew(index)

    return renew
