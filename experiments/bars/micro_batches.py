"""Which micro-batches fit: bytes alone, which no calibrated number changes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from experiments.bars.bar import Step
from zofftk.baselines.prediction import OWN
from zofftk.profile import load_profile

MACHINE = "v100-dgx2"
MOST_SLICES = 8  # as in Figure 7


@cache
def fits(system: str, size: float, ranks: int, slices: int, micro_batch: int) -> bool:
    """Our own engine is given what the paper's is, for the same batch; its own room is within a few percent of that.

    Sums of several micro-batches take nothing more on the device.
    """
    system = "zero-offload-2020" if system == OWN else system
    step = Step(system, size, ranks, slices, micro_batch, 1)
    return step.predict(load_profile(MACHINE), only_time=False).fits


def largest(system: str, size: float, ranks: int, slices: int, candidates: Iterable[int]) -> int | None:
    """Of the candidates; what fits with more samples fits with fewer."""
    rising = sorted(candidates)
    low, high = -1, len(rising)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(system, size, ranks, slices, rising[middle]) else (low, middle)
    return rising[low] if low >= 0 else None


def tiles(most: int) -> list[int]:
    """`most`, multiples of 8 below it, which matrix products take whole, and the powers of two below these."""
    return sorted({1, 2, 4, *range(8, most, 8), most} & {*range(most + 1)})


def halves(most: int) -> list[int]:
    """`most`, half of it, and so on."""
    found = [most]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found
