"""CUDA's runtime on threads, with the names CuPy gives it: enough of it to run the CUDA device where there is no GPU.

A stream is a FIFO thread, so a missing wait shows as it would on a GPU: `delay_ms` makes every copy late. Compute is
stream 0 and runs in the calling thread. Memory is host memory; `calls` counts what was called.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
import time
from collections import Counter


class FakeError(RuntimeError):
    pass


class FakeRuntime:
    def __init__(self, *, delay_ms: float = 0.0, register_limit: int | None = None) -> None:
        self.delay_ms = delay_ms
        self.register_limit = register_limit
        self.calls: Counter[str] = Counter()
        self.registered: dict[int, int] = {}
        self.fail_copies = False
        self._ids = itertools.count(1)
        self._streams: dict[int, queue.SimpleQueue] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._events: dict[int, tuple[threading.Event, list[float]]] = {}

    def setDevice(self, index):
        self.calls["setDevice"] += 1

    # -- streams

    def streamCreateWithPriority(self, flags, priority):
        assert flags == 1
        assert priority < 0
        number = next(self._ids)
        self._streams[number] = queue.SimpleQueue()

        def work(operations=self._streams[number]):
            while (operation := operations.get()) is not None:
                operation()

        self._threads[number] = threading.Thread(target=work, daemon=True, name=f"fake-stream-{number}")
        self._threads[number].start()
        return number

    def _put(self, stream, operation):
        if stream == 0:
            operation()
        else:
            self._streams[stream].put(operation)

    def issue(self, stream, operation):
        """What torch does of its own on this stream."""
        self._put(stream, operation)

    def streamSynchronize(self, stream):
        done = threading.Event()
        self._put(stream, done.set)
        done.wait()

    def streamDestroy(self, stream):
        self._streams.pop(stream).put(None)
        self._threads.pop(stream).join()

    def streamWaitEvent(self, stream, event):
        happened = self._events[event][0]
        self._put(stream, happened.wait)

    # -- events

    def eventCreate(self):
        number = next(self._ids)
        self._events[number] = threading.Event(), []
        return number

    def eventCreateWithFlags(self, flags):
        assert flags == 2
        return self.eventCreate()

    def eventRecord(self, event, stream):
        happened, times = self._events[event]

        def record():
            times.append(time.perf_counter())
            happened.set()

        self._put(stream, record)

    def eventSynchronize(self, event):
        self._events[event][0].wait()

    def eventElapsedTime(self, start, stop):
        return (self._events[stop][1][0] - self._events[start][1][0]) * 1e3

    def eventDestroy(self, event):
        # As CUDA does: an event that is still to happen lives on until it has.
        self.calls["eventDestroy"] += 1

    # -- memory

    def memcpyAsync(self, target, source, nbytes, kind, stream):
        self.calls["memcpyAsync"] += 1
        if self.fail_copies:
            raise FakeError("cudaErrorIllegalAddress")

        page_locked = [pointer for pointer in (target, source) if self._is_registered(pointer, nbytes)]

        def copy():
            time.sleep(self.delay_ms / 1e3)
            if not all(self._is_registered(pointer, nbytes) for pointer in page_locked):
                self.calls["copies of unregistered memory"] += 1
                return  # it may be gone
            ctypes.memmove(target, source, nbytes)

        self._put(stream, copy)

    def _is_registered(self, pointer, nbytes):
        registered = list(self.registered.items())
        return any(start <= pointer and pointer + nbytes <= start + size for start, size in registered)

    @property
    def num_streams(self):
        return len(self._streams)

    def hostRegister(self, pointer, nbytes, flags):
        self.calls["hostRegister"] += 1
        assert nbytes > 0
        if self.register_limit is not None and sum(self.registered.values()) + nbytes > self.register_limit:
            raise FakeError("cudaErrorMemoryAllocation: out of memory")
        self.registered[pointer] = nbytes

    def hostUnregister(self, pointer):
        self.calls["hostUnregister"] += 1
        del self.registered[pointer]
