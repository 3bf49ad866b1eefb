"""A device on CPU memory: compute is the calling thread, every other stream a thread that works its queue in order.

It trains where there is no GPU, and it proves the schedule: seeded random delays shuffle the streams against one
another, bandwidth caps stretch the copies to those of a real link, `poison` fills fresh buffers with NaN, and the
race clock of the contract is always on.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from zofftk.device import host_kernels
from zofftk.device.base import COMM, COMPUTE, DOWN, HOST, UP, Buffer, Event, Place, Placement, Run, StreamName
from zofftk.device.laned import LanedDevice


class EmulatedDevice(LanedDevice):
    """See the module.

    Args:
        keep_spans: keep a span of every operation for `trace.write`.
        delays: seed of random delays before every operation of a stream thread; None: no delays.
        max_delay_ms: the longest of these delays.
        down_gb_s, up_gb_s: bandwidth caps of the copies in 1e9 bytes a second; None: as fast as memory goes.
        poison: fill buffers with NaN when they are allocated.
    """

    def __init__(
        self,
        *,
        keep_spans: bool = False,
        delays: int | None = None,
        max_delay_ms: float = 1.0,
        down_gb_s: float | None = None,
        up_gb_s: float | None = None,
        poison: bool = False,
    ) -> None:
        super().__init__(keep_spans=keep_spans)
        self._poison = poison
        self._gb_s: dict[StreamName, float | None] = {DOWN: down_gb_s, UP: up_gb_s}
        self._start_lanes(lambda stream: None if delays is None else _Delay(f"{delays} {stream}", max_delay_ms))

    # -- memory ------------------------------------------------------------------------------------------------

    def _allocate(self, numel: int, dtype: torch.dtype, place: Place, zero: bool, on_link: bool) -> torch.Tensor:
        # numpy asks for huge pages where the system offers them on request; torch does not.
        nbytes = max(1, numel) * dtype.itemsize
        flat = np.zeros(nbytes, np.uint8) if zero else np.empty(nbytes, np.uint8)
        if self._poison and not zero:
            flat.fill(0xFF)  # NaN in every float dtype
        return torch.from_numpy(flat).view(dtype)[:numel]

    # -- order -------------------------------------------------------------------------------------------------

    def _record(self, stream: StreamName) -> threading.Event:
        done = threading.Event()
        if stream == COMPUTE:
            done.set()  # compute runs in the calling thread: what was enqueued is done
        else:
            self._enqueue(stream, done.set, always=True)
        return done

    def _wait(self, stream: StreamName, event: Event, why: str) -> None:
        if stream == COMPUTE:
            self._block(COMPUTE, event, why)
        elif not event.handle.is_set():
            self._enqueue(stream, event.handle.wait, always=True)

    def _synchronize(self, event: Event, why: str) -> None:
        self._block("main", event, why)

    def _block(self, lane: str, event: Event, why: str) -> None:
        self._check_usable()
        with self.trace.span(lane, why):
            event.handle.wait()
        self._fault.raise_if_set()

    # -- operations --------------------------------------------------------------------------------------------

    def _pack(
        self, label: str, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer, square_sums: Buffer
    ) -> None:
        self._check_usable()
        with self.trace.span(COMPUTE, label):
            host_kernels.pack(placement, tensors, dst.tensor, square_sums.tensor)

    def _copy(self, stream: StreamName, label: str, dst: Buffer, src: Buffer, runs: Sequence[Run], nbytes: int) -> None:
        # numpy copies without torch's thread pool, which each thread would start anew, and drops the GIL.
        dst_bytes, src_bytes = dst.tensor.view(torch.uint8).numpy(), src.tensor.view(torch.uint8).numpy()
        size, gb_s = src.itemsize, self._gb_s[stream]

        def copy() -> None:
            start_s = time.perf_counter()
            for run in runs:
                part = slice(run.offset * size, (run.offset + run.numel) * size)
                np.copyto(dst_bytes[part], src_bytes[part])
            if gb_s is not None:
                time.sleep(max(0.0, start_s + nbytes / (gb_s * 1e9) - time.perf_counter()))
            self.trace.add(stream, label, start_s, time.perf_counter(), nbytes)

        self._enqueue(stream, copy)

    def _copy_back(self, label: str, src: Buffer, placement: Placement, tensors: Sequence[torch.Tensor]) -> None:
        self._check_usable()
        with self.trace.span(COMPUTE, label):
            host_kernels.copy_back(src.tensor, placement, tensors)

    def _zero(self, label: str, dst: Buffer) -> None:
        self._check_usable()
        with self.trace.span(COMPUTE, label):
            dst.tensor.zero_()

    def _collective(self, label: str, operation: Callable[[], None]) -> None:
        def run() -> None:
            with self.trace.span(COMM, label):
                operation()

        self._enqueue(COMM, run)

    def _host_task(self, label: str, task: Callable[[], None]) -> None:
        def run() -> None:
            with self.trace.span(HOST, label):
                task()

        self._enqueue(HOST, run)

    def _value(self, buffer: Buffer) -> np.ndarray:
        return buffer.tensor.numpy()

    def _load(self, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer) -> None:
        host_kernels.load(placement, tensors, dst.tensor)


class _Delay:
    """A seeded random pause before each operation."""

    def __init__(self, seed: str, max_delay_ms: float) -> None:
        self._random = random.Random(seed)
        self._max_delay_ms = max_delay_ms

    def __call__(self) -> None:
        time.sleep(self._random.random() * self._max_delay_ms / 1e3)
