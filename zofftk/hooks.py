"""The hook that takes a parameter's gradient the moment autograd has finished it, and leaves a stand-in."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle


class Taker(Protocol):
    def name(self, index: int) -> str: ...
    def take(self, index: int, grad: torch.Tensor) -> None: ...


def attach(taker: Taker, index: int, param: torch.Tensor, stand_in: torch.Tensor | None) -> RemovableHandle:
    """After each accumulation into `param.grad`: give the gradient to `taker` and put `stand_in` in its place.

    The parameter keeps the hook, and the hook keeps nothing else alive: a forgotten optimizer leaves a hook that does
    nothing. A gradient that went through the stand-in's `add_` is in the taker's hands already.
    """
    reference = weakref.ref(taker)
    strided = torch.strided

    def hook(param: torch.Tensor) -> None:
        grad = param.grad
        taker = reference()
        if taker is None or grad is None or grad is stand_in:
            return
        if grad.layout is not strided:
            param.grad = None
            raise TypeError(
                f"the gradient of {taker.name(index)} is {grad.layout}, expected a dense one: "
                "build its embedding with sparse=False"
            )
        taker.take(index, grad)
        param.grad = stand_in

    return param.register_post_accumulate_grad_hook(hook)
