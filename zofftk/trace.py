"""What the streams did and when: totals always, every span on request, as a Chrome trace."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zofftk.atomic_file import replacing

MAX_SPANS = 100_000  # the oldest go first: a run of any length keeps bounded memory


@dataclass(frozen=True)
class Span:
    """One operation on one lane. Times are seconds on `time.perf_counter`'s clock."""

    lane: str
    label: str
    start_s: float
    stop_s: float
    nbytes: int = 0


class Trace:
    """Durations by kind, in milliseconds, and the last MAX_SPANS spans behind them when `keep_spans` is set.

    A kind is the first word group of a label, up to a colon: "adam: bucket 3" is of the kind "adam".
    """

    def __init__(self, *, keep_spans: bool = False) -> None:
        self.keep_spans = keep_spans
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._total_ms: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, lane: str, label: str, start_s: float, stop_s: float, nbytes: int = 0) -> None:
        with self._lock:
            self._total_ms[lane, label.partition(":")[0]] += (stop_s - start_s) * 1e3
            if self.keep_spans:
                self.spans.append(Span(lane, label, start_s, stop_s, nbytes))

    @contextmanager
    def span(self, lane: str, label: str, nbytes: int = 0) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, label, start_s, time.perf_counter(), nbytes)

    def total_ms(self, lane: str, kind: str) -> float:
        return self._total_ms.get((lane, kind), 0.0)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the spans as a Chrome trace (chrome://tracing, Perfetto); timestamps in microseconds from the first."""
        text = json.dumps({"traceEvents": list(self._events()), "displayTimeUnit": "ms"})
        with replacing(Path(path)) as file:
            file.write(text.encode())

    def _events(self) -> Iterator[dict[str, Any]]:
        first_s = min((span.start_s for span in self.spans), default=0.0)
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(span.lane for span in self.spans))}
        for lane, number in lanes.items():
            yield {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": lane}}
        for span in self.spans:
            yield {
                "ph": "X",
                "pid": 1,
                "tid": lanes[span.lane],
                "name": span.label,
                "ts": (span.start_s - first_s) * 1e6,
                "dur": (span.stop_s - span.start_s) * 1e6,
                "args": {"bytes": span.nbytes} if span.nbytes else {},
            }
