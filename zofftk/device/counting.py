"""A device without data: it counts operations and bytes and keeps the race clock, in one thread.

The engine runs on it with fake tensors (`torch._subclasses.FakeTensorMode`, device cpu), so nothing in the schedule
can depend on real memory. A value it is asked for is `answer`, in every element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from zofftk.device.base import Buffer, Device, Event, Place, Placement, Run, StreamName


class CountingDevice(Device):
    """`operations` counts by kind, `allocated_bytes` by place."""

    def __init__(self, *, answer: float = 1.0) -> None:
        super().__init__()
        self.answer = answer
        self.operations: Counter[str] = Counter()
        self.allocated_bytes: Counter[Place] = Counter()

    def _allocate(self, numel: int, dtype: torch.dtype, place: Place, zero: bool, on_link: bool) -> torch.Tensor:
        self.allocated_bytes[place] += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype)  # fake: holds no memory

    def _record(self, stream: StreamName) -> None:
        return None

    def _wait(self, stream: StreamName, event: Event, why: str) -> None:
        self.operations["wait"] += 1

    def _synchronize(self, event: Event, why: str) -> None:
        self.operations["synchronize"] += 1

    def _pack(
        self, label: str, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer, square_sums: Buffer
    ) -> None:
        self.operations["pack"] += 1

    def _copy(self, stream: StreamName, label: str, dst: Buffer, src: Buffer, runs: Sequence[Run], nbytes: int) -> None:
        self.operations[stream] += 1

    def _copy_back(self, label: str, src: Buffer, placement: Placement, tensors: Sequence[torch.Tensor]) -> None:
        self.operations["copy back"] += 1

    def _zero(self, label: str, dst: Buffer) -> None:
        self.operations["zero"] += 1

    def _open_comm(self) -> None:
        return None

    def _collective(self, label: str, operation: Callable[[], None]) -> None:
        self.operations["comm"] += 1

    def _host_task(self, label: str, task: Callable[[], None]) -> None:
        self.operations["host"] += 1

    def _value(self, buffer: Buffer) -> np.ndarray:
        return np.full(buffer.tensor.numel(), self.answer)

    def _load(self, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer) -> None:
        self.operations["load"] += 1

    def close(self) -> None:
        return None
