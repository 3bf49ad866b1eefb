"""A device on CPU memory: compute is the calling thread, every other stream a thread that works its queue in order.

It trains where there is no GPU, and it proves the schedule: seeded random delays shuffle the streams against one
another, bandwidth caps stretch the copies to those of a real link, `poison` fills fresh buffers with NaN, and the
race clock of the contract is always on.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from zofftk import cpu_kernels
from zofftk.device.base import COMPUTE, DOWN, UP, Buffer, Device, Event, Part, Place, Run, StreamName
from zofftk.triton_kernels import reference  # pyright: ignore[reportMissingImports]  (mapped when installed)

Operation = Callable[[], None]

# torch's own second thread spins for milliseconds after each of its operations. Sharing a core with it costs more
# than a second thread of ours brings, and the copies are too short to matter.
COMPUTE_THREADS = 1


class EmulatedDevice(Device):
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
        self._pid = os.getpid()
        self._fault = _Fault()
        self._lanes: dict[StreamName, _Lane] = {}
        for stream in (DOWN, UP, "host"):
            delay = None if delays is None else _Delay(f"{delays} {stream}", max_delay_ms)
            self._lanes[stream] = _Lane(stream, self._fault, delay)

    # -- memory ------------------------------------------------------------------------------------------------

    def _allocate(self, numel: int, dtype: torch.dtype, place: Place, zero: bool) -> torch.Tensor:
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

    def _pack(self, label: str, parts: Sequence[Part], dst: Buffer, square_sums: Buffer) -> None:
        self._check_usable()
        with self.trace.span(COMPUTE, label):
            for part in parts:
                target = dst.tensor[part.offset : part.offset + part.numel]
                sums = square_sums.tensor[part.block :]
                if _is_plain(part, dst):
                    cpu_kernels.pack(part.tensor.view(-1)[part.start : part.stop], target, sums, COMPUTE_THREADS)
                else:
                    reference.pack([_range(part)], dst.tensor)
                    cpu_kernels.block_square_sums(target, sums, COMPUTE_THREADS)

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

    def _copy_back(self, label: str, src: Buffer, parts: Sequence[Part]) -> None:
        self._check_usable()
        with self.trace.span(COMPUTE, label):
            plain = [part for part in parts if _is_plain(part, src)]
            for part in plain:
                source = src.tensor[part.offset : part.offset + part.numel]
                cpu_kernels.convert(source, part.tensor.detach().view(-1)[part.start : part.stop], COMPUTE_THREADS)
            torch.autograd.graph.increment_version([part.tensor for part in plain])
            reference.copy_back(src.tensor, [_range(part) for part in parts if not _is_plain(part, src)])

    def _host_task(self, label: str, task: Callable[[], None]) -> None:
        def run() -> None:
            with self.trace.span("host", label):
                task()

        self._enqueue("host", run)

    def _value(self, buffer: Buffer) -> np.ndarray:
        return buffer.tensor.numpy()

    def _load(self, parts: Sequence[Part], dst: Buffer) -> None:
        reference.pack([_range(part) for part in parts], dst.tensor)

    # -- streams -----------------------------------------------------------------------------------------------

    def _enqueue(self, stream: StreamName, operation: Operation, *, always: bool = False) -> None:
        self._check_usable()
        self._fault.raise_if_set()
        self._lanes[stream].put(operation, always)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("the offload engine's threads did not survive fork(): build the optimizer in the child")
        if not self._lanes:
            raise RuntimeError("the offload engine is closed")

    def close(self) -> None:
        lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.end()
        if os.getpid() == self._pid:
            for lane in lanes:
                lane.thread.join()


def _is_plain(part: Part, flat: Buffer) -> bool:
    """Whether the compiled kernels can move it; the rest goes through eager torch."""
    return part.tensor.is_contiguous() and cpu_kernels.converts(part.tensor.dtype, flat.tensor.dtype)


def _range(part: Part) -> reference.Range:
    return reference.Range(part.tensor, part.start, part.stop, part.offset)


class _Fault:
    """The first exception of any stream. Later work is dropped, so that every waiter wakes up and sees it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def set(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def raise_if_set(self) -> None:
        if self.error is not None:
            raise self.error


class _Delay:
    """A seeded random pause before each operation."""

    def __init__(self, seed: str, max_delay_ms: float) -> None:
        self._random = random.Random(seed)
        self._max_delay_ms = max_delay_ms

    def __call__(self) -> None:
        time.sleep(self._random.random() * self._max_delay_ms / 1e3)


class _Lane:
    """One FIFO thread. The thread holds the queue but not the lane, so a forgotten device ends its threads."""

    def __init__(self, name: str, fault: _Fault, delay: _Delay | None) -> None:
        self._queue: queue.SimpleQueue[tuple[Operation, bool] | None] = queue.SimpleQueue()
        args: tuple[Any, ...] = (self._queue, fault, delay)
        self.thread = threading.Thread(target=_work, args=args, name=f"zofftk-{name}", daemon=True)
        self.thread.start()
        self.end = weakref.finalize(self, self._queue.put, None)
        self.end.atexit = False  # the thread is a daemon

    def put(self, operation: Operation, always: bool) -> None:
        self._queue.put((operation, always))


def _work(operations: queue.SimpleQueue[tuple[Operation, bool] | None], fault: _Fault, delay: _Delay | None) -> None:
    while (entry := operations.get()) is not None:
        operation, always = entry
        if fault.error is not None and not always:
            continue
        try:
            if delay is not None and not always:
                delay()
            operation()
        except BaseException as error:
            fault.set(error)
        del entry, operation  # nothing it holds is kept alive by a waiting thread
