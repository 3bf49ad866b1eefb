"""What loss curves say, as numbers: pure functions of the samples in records.

Losses are in nats, per token or per text; a curve is the training loss of every step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Curve = Sequence[float]


@dataclass(frozen=True)
class Slope:
    """Least-squares slope of a loss and its standard error, which takes the scatter of steps as independent."""

    per_1000_steps: float
    standard_error: float


@dataclass(frozen=True)
class SeedDifference:
    """One kind of run against another, seed by seed: both saw the same batches from the same start."""

    seeds: int
    mean: float
    sd_of_differences: float  # over the seeds
    seed_sd: float  # of the reference: how far apart runs lie that differ in nothing but their seed

    @property
    def in_seed_sds(self) -> float:
        """NaN where one seed, or a loss that is not finite, leaves no spread to measure by."""
        return self.mean / self.seed_sd if self.seed_sd else math.nan


@dataclass(frozen=True)
class Lag:
    """How far one kind of run is behind another on the way; losses smoothed and averaged over the seeds."""

    largest_gap: float
    at_step: int
    last_step_behind: int | None  # by more than the tolerance; None: nowhere


def last_tenth(curve: Curve) -> np.ndarray:
    values = np.asarray(curve, np.float64)
    return values[-max(3, math.ceil(len(values) / 10)) :]


def final_loss(curve: Curve) -> float:
    """The mean over the last tenth: one batch says little."""
    return float(last_tenth(curve).mean())


def slope_of_last_tenth(curve: Curve) -> Slope:
    """Whether the loss has flattened."""
    losses = last_tenth(curve)
    return slope_of(np.arange(len(losses)), losses)


def held_out_slope(evaluations: Sequence[Mapping[str, float]]) -> float:
    """The same of the held-out loss, in nats per 1000 steps: always of the same text, so that it scatters less.

    NaN where fewer than two evaluations are in the last tenth.
    """
    begins = 0.9 * evaluations[-1]["step"]
    late = [(one["step"], one["held_out_loss"]) for one in evaluations if one["step"] >= begins]
    return slope_of(*np.transpose(late)).per_1000_steps if len(late) > 1 else math.nan


def slope_of(steps: np.ndarray, losses: np.ndarray) -> Slope:
    """Least squares."""
    steps = steps - steps.mean()
    spread = float(steps @ steps)
    slope = float(steps @ losses) / spread
    residuals = losses - losses.mean() - slope * steps
    freedom = len(losses) - 2
    error = math.sqrt(float(residuals @ residuals) / freedom / spread) if freedom else math.nan
    return Slope(1000 * slope, 1000 * error)


def first_difference(one: Curve, other: Curve) -> int | None:
    """The first step, counted from 1, whose losses differ or which one of the curves lacks; None: there is none."""
    for step, (a, b) in enumerate(zip(one, other, strict=False), start=1):
        if a != b and not (math.isnan(a) and math.isnan(b)):
            return step
    return None if len(one) == len(other) else min(len(one), len(other)) + 1


def mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    """The standard deviation is that of a sample; NaN where there is one value."""
    array = np.asarray(values, np.float64)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else math.nan


def seed_difference(reference: Mapping[int, float], other: Mapping[int, float]) -> SeedDifference:
    """`other` minus `reference`, both by seed, over the seeds that both have."""
    seeds = sorted(reference.keys() & other.keys())
    if not seeds:
        raise ValueError(f"expected a seed that both have, got {sorted(reference)} and {sorted(other)}")
    mean, sd = mean_and_sd([other[seed] - reference[seed] for seed in seeds])
    return SeedDifference(len(seeds), mean, sd, mean_and_sd(list(reference.values()))[1])


def smoothed(curve: Curve, window: int) -> np.ndarray:
    """Moving means of `window` steps; the first is that of steps 1 to `window`."""
    if not 1 <= window <= len(curve):
        raise ValueError(f"window: expected 1 to {len(curve)} steps, got {window}")
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(curve, np.float64)]))
    return (sums[window:] - sums[:-window]) / window


def lag(reference: Sequence[Curve], other: Sequence[Curve], *, window: int, tolerance: float) -> Lag:
    """Steps named are the middles of windows."""
    of_each = [np.mean([smoothed(curve, window) for curve in curves], axis=0) for curves in (reference, other)]
    gap = of_each[1] - of_each[0]
    largest, behind = int(np.argmax(gap)), np.flatnonzero(gap > tolerance)
    middle = (window + 1) // 2
    return Lag(float(gap[largest]), largest + middle, int(behind[-1]) + middle if len(behind) else None)
