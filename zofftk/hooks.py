"""The hook that takes a parameter's gradient the moment autograd has finished it, and leaves a stand-in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from zofftk.validation import check_gradient


class Taker(Protocol):
    def name(self, index: int) -> str: ...
    def take(self, index: int, grad: torch.Tensor) -> bool: ...


def attach(
    taker: Taker,
    index: int,
    param: torch.Tensor,
    stand_ins: Sequence[torch.Tensor | None],
    renew: Callable[[int], None],
) -> RemovableHandle:
    """After each accumulation into `param.grad`: give the gradient to `taker`, put `stand_ins[index]` in its place.

    The parameter keeps the hook, and the hook keeps neither the taker nor the optimizer alive: a forgotten optimizer
    leaves a hook that does nothing. A gradient that went through the stand-in's `add_` is in the taker's hands already.
    Where a gathered gradient is dropped for this one, `renew(index)` makes another stand-in, so that one that was put
    aside is known to be out of date.
    """
    reference = weakref.ref(taker)
    strided = torch.strided

    def hook(param: torch.Tensor) -> None:
        grad = param.grad
        taker = reference()
        if taker is None or grad is None or grad is stand_ins[index]:
            return
        if grad.layout is not strided:
            param.grad = None
            check_gradient(grad, taker.name(index))
        if taker.take(index, grad):
            renew(index)
        param.grad = stand_ins[index]

    return param.register_post_accumulate_grad_hook(hook)
