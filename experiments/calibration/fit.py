"""Least squares of the logarithms: Levenberg and Marquardt's steps on the numbers, whole numbers by trying each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from experiments.calibration.calibrated import Calibration
from experiments.calibration.free_numbers import FREE_NUMBERS, FreeNumber

Errors = Callable[[Calibration], Sequence[float]]  # ln(predicted / printed), one for each item

NUDGE = 0.03  # of the logarithm, for slopes
LEASH = 0.02  # a number that no item says anything about stays where it starts: its ln counts as an item, so weakly
SOFT = 0.1  # of the logarithm
ROUNDS = 5  # the sum changes by less than a percent after that


def fit(calibration: Calibration, errors: Errors, *, rounds: int = ROUNDS) -> Calibration:
    """From `calibration`, with as many rounds of steps; the whole numbers are tried in each."""
    smooth = [number for number in FREE_NUMBERS if not number.given and not number.is_count]
    counts = [number for number in FREE_NUMBERS if number.is_count]
    damping = 0.01
    best = _loss(calibration, errors, smooth)
    for _ in range(rounds):
        for count in counts:
            calibration = _best_count(calibration, errors, count, smooth)
        best = _loss(calibration, errors, smooth)
        residuals, slopes = _slopes(calibration, errors, smooth)
        for _ in range(4):
            tried = _stepped(calibration, residuals, slopes, smooth, damping)
            loss = _loss(tried, errors, smooth)
            if loss < best:
                calibration, best, damping = tried, loss, damping / 5
                break
            damping *= 10
    return calibration


def _all_errors(calibration: Calibration, errors: Errors, smooth: Sequence[FreeNumber]) -> list[float]:
    leash = [LEASH * math.log(calibration.values[number.name] / number.start) for number in smooth]
    return [*map(_softened, errors(calibration)), *leash]


def _softened(error: float) -> float:
    """Its square grows like the error, not like its square, where it is large: the paper contradicts itself, and one
    item that no numbers can meet would otherwise pull all others along."""
    return math.copysign(SOFT * math.sqrt(2 * (math.sqrt(1 + (error / SOFT) ** 2) - 1)), error)


def _loss(calibration: Calibration, errors: Errors, smooth: Sequence[FreeNumber]) -> float:
    return sum(error**2 for error in _all_errors(calibration, errors, smooth))


def _slopes(calibration: Calibration, errors: Errors, smooth: Sequence[FreeNumber]) -> tuple[list[float], torch.Tensor]:
    here = _all_errors(calibration, errors, smooth)
    columns = []
    for number in smooth:
        # Downwards where a number is at its highest.
        value = calibration.values[number.name]
        nudge = NUDGE if value * math.exp(NUDGE) <= number.highest else -NUDGE
        there = _all_errors(calibration.but({number.name: value * math.exp(nudge)}), errors, smooth)
        columns.append([(b - a) / nudge for a, b in zip(here, there, strict=True)])
    return here, torch.tensor(columns, dtype=torch.float64).T


def _stepped(
    calibration: Calibration,
    residuals: Sequence[float],
    slopes: torch.Tensor,
    smooth: Sequence[FreeNumber],
    damping: float,
) -> Calibration:
    normal = slopes.T @ slopes
    normal += damping * torch.diag(normal.diagonal())
    step = torch.linalg.solve(normal, -slopes.T @ torch.tensor(residuals, dtype=torch.float64))
    changed = {}
    for number, by in zip(smooth, step.tolist(), strict=True):
        value = calibration.values[number.name] * math.exp(max(-1.0, min(1.0, by)))
        changed[number.name] = min(max(value, number.lowest), number.highest)
    return calibration.but(changed)


def _best_count(
    calibration: Calibration, errors: Errors, count: FreeNumber, smooth: Sequence[FreeNumber]
) -> Calibration:
    whole = range(int(count.lowest), int(count.highest) + 1)
    tried = [calibration.but({count.name: number}) for number in whole]
    return min(tried, key=lambda each: _loss(each, errors, smooth))
