"""Fits the free numbers of the predicted figures on a few bars, and shows what they predict of figures left out."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.bars.bar import Bar
from experiments.bars.figures import FIGURES, bars_of
from experiments.calibration.calibrated import FILE, Calibration, load, save, start
from experiments.calibration.fit import fit
from experiments.calibration.free_numbers import COUNTS, FREE_NUMBERS, ITEMS, FreeNumber
from experiments.calibration.items import errors_of
from experiments.paper_values import OOM, paper_values
from experiments.record import keep

FEW_ROUNDS = 2  # from the fit on all items, a fit on most of them is near


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-left-out", action="store_true", help="fit only; skip the fits that leave a figure out")
    parser.add_argument("--kept", action="store_true", help="the values that are there, not fitted again")
    parser.add_argument("--quick", action="store_true", help="--kept --no-left-out")


def run(options: argparse.Namespace) -> int:
    if not (options.kept or options.quick):
        save(fit(start(), errors_of()), FILE)
    fitted = load()  # rounded, as the figures have it
    print(*table(fitted), sep="\n")
    errors = dict(zip(ITEMS, errors_of()(fitted), strict=True))
    print("\nfitted on, and how far from it (%):")
    for (figure, system, x), error in errors.items():
        print(f"  {figure:7}{system:26}{x:>5}{percent(error):+7.1f}")
    left_out = {} if options.no_left_out or options.quick else leave_each_out(fitted)
    if left_out:
        print("\nmedian absolute error (%) of a figure's bars, fitted on")
        print(f"  {'':8}{'all items':>10}{'those of other figures':>24}")
        for figure, both in left_out.items():
            print(f"  {figure:8}{both['with']:10.1f}{both['without']:24.1f}")
    results = {
        "values": dict(fitted.values),
        "numbers": [_described(number, fitted.values[number.name]) for number in FREE_NUMBERS],
        "report": _as_markdown(left_out),
        "items": [{"item": list(item), "error_percent": percent(error)} for item, error in errors.items()],
        "left_out": left_out,
    }
    # A record of other values than the file's is made anew.
    config = {"table": [vars(number) for number in FREE_NUMBERS], "counts": COUNTS, "calibration": dict(fitted.values)}
    print("record:", keep("calibration", config, [list(item) for item in ITEMS], results))
    return 0


def _described(number: FreeNumber, value: float) -> dict[str, Any]:
    said = {name: getattr(number, name) for name in ("name", "meaning", "unit", "start")}
    return said | {"value": value, "fitted on": number.fitted_on}


def _as_markdown(left_out: Mapping[str, Mapping[str, float]]) -> list[str]:
    if not left_out:
        return []
    head = ["| median absolute error of all bars | fitted on all items | on those of other figures |"]
    lines = [f"| {name} | {both['with']:.1f} % | {both['without']:.1f} % |" for name, both in left_out.items()]
    return [*head, "| --- | --- | --- |", *lines]


def percent(error: float) -> float:
    return 100 * (math.exp(error) - 1)


def table(calibration: Calibration) -> list[str]:
    lines = [f"{'free number':38}{'start':>8}{'value':>9}  unit, meaning, fitted on"]
    for number in FREE_NUMBERS:
        value = calibration.values[number.name]
        text = f"{number.unit}; {number.meaning}; {number.fitted_on}"
        lines.append(f"{number.name:38}{number.start:8g}{value:9.4g}  {text}")
    lines += [f"micro_batches.{figure:24}{'':8}{'':9}  not fitted; {why}" for figure, why in COUNTS.items()]
    return lines


def leave_each_out(fitted: Calibration) -> dict[str, dict[str, float]]:
    """For each figure that gives items: its error with all numbers, and with those fitted on other figures' items."""
    results = {}
    for figure in FIGURES:
        others = [item for item in ITEMS if item[0] != figure]
        without = fitted if len(others) == len(ITEMS) else fit(fitted, errors_of(others), rounds=FEW_ROUNDS)
        results[figure] = {"with": median_error(figure, fitted), "without": median_error(figure, without)}
    return results


def median_error(figure: str, calibration: Calibration) -> float:
    """Of all bars of a figure which have a number, those in the calibration too."""
    profile, printed = calibration.profile, paper_values(figure)
    bars = [bar for bar in bars_of(figure, calibration.counts) if not bar.ours]
    return statistics.median(_percents(bars, printed, profile))


def _percents(bars: Sequence[Bar], printed: Mapping[tuple[str, str], float | str], profile: Any) -> list[float]:
    errors = []
    for bar in bars:
        value, paper = bar.predict(profile)[0], printed[bar.system, bar.x]
        if value != OOM and paper != OOM:
            errors.append(100 * abs(float(value) / float(paper) - 1))
    return errors
