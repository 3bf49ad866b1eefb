"""Streams that are FIFO threads: what the emulated and the CUDA device share.

Compute is the calling thread; every other stream is a lane, a thread that works its queue in order. On a CUDA device a
lane only issues work to a CUDA stream, and blocks where the host has to be waited for.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from zofftk.device.base import COMM, DOWN, HOST, UP, Device, StreamName
from zofftk.errors import StoppedError

Operation = Callable[[], None]


class LanedDevice(Device):
    """Lanes for down, up and host, the first fault of any of them, and their end."""

    def __init__(self, *, keep_spans: bool = False) -> None:
        super().__init__(keep_spans=keep_spans)
        self._pid = os.getpid()
        self._fault = Fault()
        self._lanes: dict[StreamName, Lane] = {}

    def _start_lanes(self, before: Callable[[StreamName], Operation | None]) -> None:
        """`before(stream)` gives what its thread does before every operation, or None."""
        self._before = before
        for stream in (DOWN, UP, HOST):
            self._start_lane(stream)

    def _start_lane(self, stream: StreamName) -> None:
        self._lanes[stream] = Lane(stream, self._fault, self._before(stream))

    def _open_comm(self) -> None:
        self._start_lane(COMM)

    def check_going(self) -> None:
        self._check_usable()
        self._fault.raise_if_set()

    def _enqueue(self, stream: StreamName, operation: Operation, *, always: bool = False) -> None:
        """`always`: also after a fault, so that whoever waits for it wakes up."""
        self.check_going()
        self._lanes[stream].put(operation, always)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("the offload engine's threads did not survive fork(): build the optimizer in the child")
        if not self._lanes:
            raise RuntimeError("the offload engine is closed")

    def runs_here(self) -> bool:
        return any(lane.thread is threading.current_thread() for lane in self._lanes.values())

    def unseen(self, error: Exception) -> None:
        if not isinstance(error, StoppedError):
            self._fault.put_back(error)

    def close(self) -> None:
        lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.end()
        if os.getpid() == self._pid:
            for lane in lanes:
                lane.thread.join()


class Fault:
    """The first exception of any lane. Later work is dropped, so that every waiter wakes up and sees it."""

    def __init__(self) -> None:
        self.is_set = False
        self._error: BaseException | None = None
        self._summary = ""
        self._lock = threading.Lock()

    def set(self, error: BaseException) -> None:
        with self._lock:
            if not self.is_set:
                self.is_set, self._error, self._summary = True, error, f"{type(error).__name__}: {error}"

    def raise_if_set(self) -> None:
        """The error itself the first time. It is let go of then: its traceback holds the caller's frames, and so all
        that should end with the optimizer."""
        if self.is_set:
            with self._lock:
                error, self._error = self._error, None
            raise error or StoppedError(f"the offload engine has stopped at an earlier fault: {self._summary}")

    def put_back(self, error: BaseException) -> None:
        """It was raised where nobody could see it."""
        with self._lock:
            self._error = error


class Lane:
    """One FIFO thread. The thread holds the queue but not the lane, so a forgotten device ends its threads."""

    def __init__(self, name: str, fault: Fault, before: Operation | None) -> None:
        self._queue: queue.SimpleQueue[tuple[Operation, bool] | None] = queue.SimpleQueue()
        args: tuple[Any, ...] = (self._queue, fault, before)
        self.thread = threading.Thread(target=_work, args=args, name=f"zofftk-{name}", daemon=True)
        self.thread.start()
        self.end = weakref.finalize(self, self._queue.put, None)
        self.end.atexit = False  # the thread is a daemon

    def put(self, operation: Operation, always: bool) -> None:
        self._queue.put((operation, always))


def _work(operations: queue.SimpleQueue[tuple[Operation, bool] | None], fault: Fault, before: Operation | None) -> None:
    while (entry := operations.get()) is not None:
        operation, always = entry
        if fault.is_set and not always:
            continue
        try:
            if before is not None and not always:
                before()
            operation()
        except BaseException as error:
            fault.set(error)
        del entry, operation  # nothing it holds is kept alive by a waiting thread
