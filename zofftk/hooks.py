"""The hook that takes a parameter's gradient the moment autograd has finished it, and leaves a stand-in.

A hook runs between two operations of autograd, with cold caches, so it does as little as it can: it puts a small
gradient into an inbox, which the engine empties in one go when there are enough. A large one is delivered at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from zofftk.ranks.slices import is_sliced, local_of
from zofftk.validation import check_gradient

if TYPE_CHECKING:
    from zofftk.engine import Engine

INBOX_SIZE = 48  # gradients that are taken in one go
LARGE_BYTES = 64 * 1024  # of a gradient that is worth a delivery of its own


def attach(taker: Engine, index: int, param: torch.Tensor, stand_ins: Sequence[torch.Tensor | None]) -> RemovableHandle:
    """After each accumulation into `param.grad`: give the gradient to `taker`, put `stand_ins[index]` in its place.

    The parameter keeps the hook, and the hook keeps neither the taker nor the optimizer alive: a forgotten optimizer
    leaves a hook that does nothing. A gradient that went through the stand-in's `add_` is in the taker's hands already.
    """
    reference = weakref.ref(taker)
    inbox = taker.inbox
    strided = torch.strided
    outstanding = taker.outstanding
    in_flight = taker.way_up.in_flight
    has_slice = is_sliced(param)
    is_large = local_of(param).numel() * param.dtype.itemsize >= LARGE_BYTES
    # An exchange inside backward is for the backward that has brought the gradient, and not for one after it.
    at_once = is_large or taker.inside.needs_each

    def hook(param: torch.Tensor) -> None:
        grad = param.grad
        taker = reference()
        if taker is None or grad is None or grad is stand_ins[index]:
            return
        if grad.layout is not strided:
            param.grad = None
            check_gradient(grad, taker.name(index))
        if has_slice:
            grad = taker.managed[index].to_slice(grad)
        inbox.append((index, grad))
        # At once also where it replaces one that was gathered, and where new values are still to land.
        if at_once or len(inbox) >= INBOX_SIZE or outstanding[index] or in_flight:
            taker.deliver()
        outstanding[index] = 1
        try:
            param.grad = stand_ins[index]
        except RuntimeError:  # `model.bfloat16()`, or the like, has changed the parameter
            taker.managed[index].check(param)
            taker.renew(index)
            param.grad = stand_ins[index]

    return param.register_post_accumulate_grad_hook(hook)
