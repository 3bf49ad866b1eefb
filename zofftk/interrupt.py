"""Ctrl-C as a request: the first one is remembered, the second one aborts."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class StopRequest:
    made: bool = False


@contextmanager
def stop_on_interrupt(*, says: bool = True) -> Iterator[StopRequest]:
    """Inside the block the first SIGINT sets `made`, and says so; a second raises KeyboardInterrupt as usual."""
    request = StopRequest()

    def remember(signum: int, frame: object) -> None:
        request.made = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A plain write: printing is not safe while the interrupted code may be printing itself.
        if says:
            os.write(2, b"\nFinishing this step, then saving. Ctrl-C again aborts without saving.\n")

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, previous)
