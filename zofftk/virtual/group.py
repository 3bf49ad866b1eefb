"""Ranks that are only numbers: what they tell each other takes its time and bytes, and moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zofftk.device.base import Buffer, Device


class VirtualGroup:
    """A group of `size` ranks which all do the same at the same time; this is the first one.

    It goes to an optimizer as its `process_group`.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.size, self.rank = size, 0
        self.process_group = None
        self._device = device
        device.open_comm()

    def collective(self, label: str, operation: Callable[[Any, Any, Any], None], dst: Buffer, src: Buffer) -> None:
        self._device.collective(label, lambda into, out_of: None, dst, src)

    def check_same(self, described: Sequence[object]) -> None:
        return None

    def take_firsts(self, tensors: Sequence[torch.Tensor]) -> None:
        return None

    def close(self) -> None:
        return None
