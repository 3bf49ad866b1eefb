"""Ranks that are only a number: what they tell each other takes its time and its bytes, and moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zofftk.device.base import Buffer, Device


class VirtualGroup:
    """`size` ranks that all do the same at the same time; this is the first of them.

    It is handed to an optimizer as its `process_group`, and needs no torch.distributed.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be 1 rank or more, got {size}")
        self.size = size
        self.members = range(size)

    def open(self, device: Device) -> None:
        """Collectives are `device`'s."""
        self._device = device
        device.open_comm()

    def collective(self, label: str, operation: Callable[[Any, Any, Any], None], dst: Buffer, src: Buffer) -> None:
        self._device.collective(label, lambda into, out_of: None, dst, src)

    def check_same(self, described: Sequence[object], label: str, what: str = "") -> None:
        """They are."""

    def take_firsts(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        """There are no values."""

    def sum(self, values: torch.Tensor, label: str) -> None:
        """There are no values."""

    def close(self) -> None:
        """Nobody waits for anybody."""
