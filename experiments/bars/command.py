"""What the commands of the predicted figures have in common."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence

from experiments.bars.bar import Bar, Counts
from experiments.bars.rows import error_percent, rows_of, shown
from experiments.calibration.calibrated import load
from experiments.calibration.free_numbers import COUNTS, FREE_NUMBERS
from experiments.record import keep

ASSUMPTIONS = (
    "the model, its heads, length and vocabulary: docs/baselines.md",
    "TFLOPS of one device by 96·B·s·L·h²·(1 + s/(6h) + V/(16·L·h)), recomputation, scores and head included",
    "predicted on the virtual clock; free numbers: `python -m experiments calibration`",
)
QUICK_PLACES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paper-only", action="store_true", help="only the paper's systems, without our engine")
    parser.add_argument(
        "--quick", action="store_true", help=f"these alone, each at its first {QUICK_PLACES} places of the axis"
    )


def _chosen(bars: Sequence[Bar], options: argparse.Namespace) -> list[Bar]:
    without_ours = options.paper_only or options.quick
    chosen = [bar for bar in bars if not (bar.ours and without_ours)]
    if not options.quick:
        return chosen
    of_systems = {bar.system: [each for each in chosen if each.system == bar.system] for bar in chosen}
    return [bar for some in of_systems.values() for bar in some[:QUICK_PLACES]]


def predict_figure(
    figure: str, bars: Callable[[Counts], list[Bar]], assumptions: Sequence[str], options: argparse.Namespace
) -> int:
    calibration = load()
    wanted = _chosen(bars(calibration.counts), options)
    all_assumptions = (*assumptions, *ASSUMPTIONS)
    print("assumed:", *(f"  {each}" for each in all_assumptions), sep="\n")
    rows = rows_of(wanted, calibration.profile)
    print(*shown(rows), sep="\n")
    counted = [row for row in rows if not row["used_in_calibration"]]
    errors = [abs(error) for row in counted if (error := error_percent(row)) is not None]
    print(f"median absolute error of {len(errors)} bars outside the calibration: {statistics.median(errors):.1f} %")
    config = {
        "assumptions": all_assumptions,
        "profile": dataclasses.asdict(calibration.profile),
        "calibration": dict(calibration.values),
        "free_numbers": [vars(number) for number in FREE_NUMBERS],
        "micro_batches": COUNTS | {name: str(count) for name, count in calibration.counts.items()},
    }
    print("record:", keep(figure, config, [], {"rows": rows}))
    return 0
