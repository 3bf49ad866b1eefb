"""A parameter's gradients go to one optimizer: a later one closes an earlier one that it shares parameters with."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zofftk.optimizer import OffloadAdamW

logger = logging.getLogger("zofftk")

_living: weakref.WeakSet[OffloadAdamW] = weakref.WeakSet()


def close_others(optimizer: OffloadAdamW, params: Sequence[torch.Tensor]) -> None:
    """`optimizer` takes `params`. A notebook cell that is run again builds its optimizer while the old one lives."""
    for other in list(_living):
        if other is not optimizer and any(other.takes(param) for param in params):
            logger.warning("an optimizer was closed, because a later one takes gradients of its parameters")
            other.close()
    _living.add(optimizer)
