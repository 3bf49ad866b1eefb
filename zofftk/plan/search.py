"""The largest whole number that fits, in few tries."""

from __future__ import annotations

import math
from collections.abc import Callable

MOST = 1 << 20
MOST_LAYERS, MOST_TIMES = 128, 4  # nobody trains a model of many more layers


def most_layers(own: int) -> int:
    """Where the search for layers ends."""
    return max(MOST_LAYERS, MOST_TIMES * own)


def largest_fitting(
    free: Callable[[int], float], first: int, *, second: int | None = None, least: int = 1, most: int = MOST
) -> int | None:
    """The largest n of which `free(n)` is 0 or more, where it falls as n grows; None where that of `least` does not.

    What is free falls along straight lines, steeper ones later, so the next try is where the line through the two that
    are nearest meets 0, and a number is known not to fit where the line through two smaller ones is below 0: three
    tries are most often enough. The result has been tried. `first` is tried first, then `second`, if given.
    """
    tried: dict[int, float] = {}

    def fits(n: int) -> bool:
        if n not in tried:
            tried[n] = free(n)
        return tried[n] >= 0

    low, high = least - 1, most + 1  # the largest that fits so far, the smallest that does not
    guess = min(max(least, first), most)
    while high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        if second is not None and second not in tried:
            tried[second] = free(second)
            low, high = (max(low, second), high) if tried[second] >= 0 else (low, min(high, second))
        if low < high - 1 and _ends_below(tried, low + 1):
            return low
        guess = min(max(_where_it_ends(tried, low, high, guess), low + 1), high - 1)
    return low if low >= least else None


def _ends_below(tried: dict[int, float], n: int) -> bool:
    """The line through the two largest below `n`, which is never steeper than what follows, is below 0 there."""
    smaller = sorted(each for each in tried if each < n)[-2:]
    if len(smaller) < 2 or smaller[1] != n - 1:
        return False
    a, b = smaller
    return tried[b] + (tried[b] - tried[a]) / (b - a) * (n - b) < 0


def _where_it_ends(tried: dict[int, float], low: int, high: int, last: int) -> int:
    """By the straight line through the two tries nearest to the end; no step is larger than twice what is known."""
    near = sorted(tried, key=lambda n: abs(tried[n]))[:2]
    if len(near) < 2:
        return last // 2 if high == last else 2 * last
    a, b = sorted(near)
    slope = (tried[b] - tried[a]) / (b - a)
    if slope >= 0:
        return (low + high) // 2 if high <= MOST else 2 * low + 1
    end = math.floor(a - tried[a] / slope)
    if end == low and high - low > 1:
        return low + 1  # proves it
    return min(end, high - 1) if high <= MOST else end
