"""Ctrl-C waits for the end of a step, so that a state is that of step k or of step k + 1 and never in between."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Inside, SIGINT is noted; on leaving, its handler runs as if the signal came then.

    Only in the main thread, which is where Python runs handlers; elsewhere there is nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, the system's default, or not Python's
        yield
        return
    noted: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(signal.SIGINT, noted[0])
