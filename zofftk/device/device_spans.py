"""How long operations on a CUDA stream took, from events on both sides of them, without waiting for any."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zofftk.trace import Trace

MAX_PENDING = 10_000  # pairs of events that have not been read yet; the oldest are read when there are more


@dataclass(frozen=True)
class _Measured:
    lane: str
    label: str
    nbytes: int
    start: int
    stop: int


class DeviceSpans:
    """Events are placed by `around` and turned into spans by `collect`, on the clock of the host.

    The two clocks are tied together once, by an event that the host waits for at construction.
    """

    def __init__(self, runtime: Any, trace: Trace) -> None:
        self._runtime = runtime
        self._trace = trace
        self._pending: deque[_Measured] = deque()
        self._lock = threading.Lock()
        self._origin = runtime.eventCreate()
        runtime.eventRecord(self._origin, 0)
        runtime.eventSynchronize(self._origin)
        self._origin_s = time.perf_counter()

    def around(self, lane: str, label: str, stream: int, nbytes: int, operation: Callable[[], None]) -> None:
        start, stop = self._runtime.eventCreate(), self._runtime.eventCreate()
        self._runtime.eventRecord(start, stream)
        operation()
        self._runtime.eventRecord(stop, stream)
        with self._lock:
            self._pending.append(_Measured(lane, label, nbytes, start, stop))
        if len(self._pending) > MAX_PENDING:
            self.collect(most=MAX_PENDING // 2)

    def collect(self, most: int | None = None) -> None:
        """Turn the oldest measurements into spans, waiting for those that are still running."""
        with self._lock:
            number = len(self._pending) if most is None else min(most, len(self._pending))
            for measured in [self._pending.popleft() for _ in range(number)]:
                self._runtime.eventSynchronize(measured.stop)
                start_ms = self._runtime.eventElapsedTime(self._origin, measured.start)
                stop_ms = self._runtime.eventElapsedTime(self._origin, measured.stop)
                start_s, stop_s = self._origin_s + start_ms / 1e3, self._origin_s + stop_ms / 1e3
                self._trace.add(measured.lane, measured.label, start_s, stop_s, measured.nbytes)
                self._runtime.eventDestroy(measured.start)
                self._runtime.eventDestroy(measured.stop)
