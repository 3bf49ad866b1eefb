"""Ctrl-C waits for the end of a step, so that a state is that of step k or of step k + 1 and never in between.

So does every other signal whose handler could raise in the middle: of a batch system, or of a timeout.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Inside, signals are noted; on leaving, their handlers run as if the signals came then.

    Only in the main thread, which is where Python runs handlers; elsewhere there is nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    handlers = {}
    for number in SIGNALS:
        if callable(handler := signal.getsignal(number)):  # not ignored, nor the system's default, nor not Python's
            handlers[number] = handler
            signal.signal(number, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in noted:
            handlers[signal.Signals(number)](number, frame)
