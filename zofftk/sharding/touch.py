"""Ranks keep in touch while they work, so that who waits can tell long work from a rank that is gone.

A collective gives up on a rank that does not come within the timeout, though it may only have much to do, such as a
file to write. So a thread of each rank takes part in a small collective again and again, until all are done: a rank
that works comes to it, and one that has ended, hangs as a whole, or does something else does not.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

PULSE_S = 0.25


class Touch:
    """Around a rank's work, with a process group that nobody else uses meanwhile."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._done, self._is_over = threading.Event(), False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="zofftk-touch", daemon=True)

    def __enter__(self) -> Touch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over = error is not None  # interrupted: this rank will not come again
        self._done.set()

    def await_others(self) -> None:
        """Until they are done as well. Raises what the collective has raised, where one of them is gone."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                is_done = self._done.wait(PULSE_S)
                if self._is_over:
                    return
                word = torch.tensor(float(is_done))
                dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self._group)
                if word.item():
                    return
        except Exception as error:
            self._error = error
