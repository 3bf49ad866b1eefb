"""The hook that takes a parameter's gradient the moment autograd has finished it."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle


class Taker(Protocol):
    def gradient_is_ready(self, index: int, param: torch.Tensor) -> None: ...


def attach(taker: Taker, index: int, param: torch.Tensor) -> RemovableHandle:
    """Call `taker.gradient_is_ready(index, param)` after each accumulation into `param.grad`.

    The parameter keeps the hook, and the hook keeps nothing alive: a forgotten optimizer leaves a hook that does
    nothing.
    """
    reference = weakref.ref(taker)

    def hook(param: torch.Tensor) -> None:
        taker = reference()
        if taker is not None:
            taker.gradient_is_ready(index, param)

    return param.register_post_accumulate_grad_hook(hook)
