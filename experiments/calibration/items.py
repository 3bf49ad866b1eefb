"""The items that numbers are fitted on, as bars: how far each is from what is printed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from experiments.bars.bar import Bar, Step
from experiments.bars.figures import bars_of
from experiments.calibration.calibrated import Calibration
from experiments.calibration.fit import Errors
from experiments.calibration.free_numbers import ITEMS, MACHINE
from experiments.paper_values import paper_values
from zofftk.profile import Profile, load_profile

Item = tuple[str, str, str]  # figure, system, place on its axis


def errors_of(items: Iterable[Item] = ITEMS) -> Errors:
    wanted = list(items)
    printed = [math.log(float(paper_values(figure)[system, x])) for figure, system, x in wanted]

    def errors(calibration: Calibration) -> Sequence[float]:
        profile = calibration.profile
        bars = bars_at(tuple(sorted(calibration.counts.items())))
        return [_reached(bars[item], profile) - value for item, value in zip(wanted, printed, strict=True)]

    return errors


@lru_cache(maxsize=64)
def bars_at(counts: tuple[tuple[str, int], ...]) -> dict[Item, Bar]:
    """The bars of all items, with so many micro-batches a step."""
    figures = {figure for figure, _, _ in ITEMS}
    return {bar.key: bar for figure in sorted(figures) for bar in bars_of(figure, dict(counts)) if bar.key in ITEMS}


def _reached(bar: Bar, profile: Profile) -> float:
    """Its logarithm."""
    return math.log(max(_tflops(step, _of_concern(step, profile)) for step in bar.steps))


@cache
def _tflops(step: Step, profile: Profile) -> float:
    return step.tflops(profile)


def _of_concern(step: Step, profile: Profile) -> Profile:
    """With the usual numbers where the step has no use for them, so that it is not predicted again when they change."""
    usual = load_profile(MACHINE).interconnect
    devices = step.ranks * step.slices
    if devices == 1:
        return replace(profile, interconnect=usual)
    if devices <= usual.devices_per_host:
        between = replace(profile.interconnect, between_gb_s=usual.between_gb_s)
        return replace(profile, interconnect=between)
    return profile
