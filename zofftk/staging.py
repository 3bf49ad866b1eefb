"""The ring of bucket-sized buffers on the device that gradients leave through and new values arrive in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from zofftk.device.base import Buffer, Device, Event, StreamName
from zofftk.layout import Bucket


@dataclass(eq=False)
class Slot:
    """One staging buffer: the bucket's elements in any wire dtype, and their statistics."""

    data: Buffer  # bytes
    square_sums: Buffer
    last_use: Event | None = None

    def typed(self, bucket: Bucket, dtype: torch.dtype) -> Buffer:
        """The place of the whole bucket in it."""
        flat = self.data.tensor.view(dtype)[: bucket.numel]
        return Buffer(self.data.name, self.data.place, flat, self.data.clock)


class StagingRing:
    """Hands out slots in turn; whoever takes one waits, on its own stream, until the last use is over."""

    def __init__(self, device: Device, num_slots: int) -> None:
        self._device = device
        self._num_slots = num_slots
        self.slots: list[Slot] = []  # all of them, whoever holds them
        self._free: deque[Slot] = deque()
        self._slot_bytes = -1
        self._num_blocks = -1

    def reserve(self, slot_bytes: int, num_blocks: int) -> None:
        """Make every slot at least this large. Only between steps, when all slots are free."""
        if slot_bytes <= self._slot_bytes and num_blocks <= self._num_blocks:
            return
        self._slot_bytes = max(slot_bytes, self._slot_bytes)
        self._num_blocks = max(num_blocks, self._num_blocks)
        for slot in self._free:
            if slot.last_use is not None:
                self._device.synchronize(slot.last_use, f"larger slots: {slot.data.name} must have been emptied")
        self._free.clear()
        self.slots.clear()
        for number in range(self._num_slots):
            name = f"staging slot {number}"
            data = self._device.buffer(name, self._slot_bytes, torch.uint8, "device")
            square_sums = self._device.buffer(f"{name} statistics", self._num_blocks, torch.float64, "device")
            self.slots.append(Slot(data, square_sums))
        self._free.extend(self.slots)

    @property
    def nbytes(self) -> int:
        return len(self.slots) * (self._slot_bytes + 8 * self._num_blocks)

    @property
    def free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    def acquire(self, stream: StreamName) -> Slot:
        """The slot that was released first; `stream` goes on when its last use is over."""
        slot = self._free[0]
        if slot.last_use is not None and slot.last_use.stream != stream:
            self._device.wait(stream, slot.last_use, f"slot for {stream}: {slot.data.name} must have been emptied")
        return self._free.popleft()

    def release(self, slot: Slot, last_use: Event) -> None:
        slot.last_use = last_use
        self._free.append(slot)
