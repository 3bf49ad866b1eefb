"""How long something takes: the median of some repetitions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

BUDGET_S = 1.5  # for the repetitions of one number
FEWEST, MOST = 3, 50


def seconds_of(operation: Callable[[], object], place: torch.device, *, calls: int = 1) -> float:
    """Of one operation of torch, among so many that are enqueued at once."""

    def run() -> None:
        for _ in range(calls):
            operation()
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    return repeat(run) / calls


def repeat(run: Callable[[], None]) -> float:
    """Median seconds of a call, after one that is not counted."""
    run()
    seconds: list[float] = []
    while len(seconds) < FEWEST or (sum(seconds) < BUDGET_S and len(seconds) < MOST):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
