"""How the predicted figures compare with the paper's: errors, which bar is higher, what does not fit, the crossover.

Bars that the calibration was fitted on count for orders and for what does not fit, not for errors.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from experiments.bars.figures import FIGURES, bars_of
from experiments.bars.rows import Row, error_percent, rows_of
from experiments.calibration.calibrated import Calibration, load
from experiments.paper_values import OOM
from experiments.record import keep, load_item

MOST_ERROR_PERCENT = 10.0
BOUND = "fig8, fig10, fig11, fig14"  # what the bound is for
LEAST_GAP = 1.05  # of two printed bars, for their order to count
CROSSOVER = ("fig11", "ZeRO-2", "ZeRO-Offload")
CROSSES_BETWEEN = (32, 64)  # GPUs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))


def run(options: argparse.Namespace) -> int:
    calibration = load()
    rows = predicted_rows(options.figures, calibration)
    results = {
        "errors": median_errors(rows),
        "orders": orders(rows),
        "oom": outs_of_memory(rows),
        "crossover": crossover(rows),
    }
    says = report(results)
    print(*says, sep="\n")
    config = {"figures": options.figures, "least_gap": LEAST_GAP, "calibration": dict(calibration.values)}
    print("record:", keep("scores", config, None, results | {"says": says}))
    return 0


def predicted_rows(figures: Sequence[str], calibration: Calibration) -> list[Row]:
    """From the figures' records, where these were made with this calibration; what has none is predicted now."""
    return [row for figure in figures for row in _rows_of_figure(figure, calibration) if not row["ours"]]


def _rows_of_figure(figure: str, calibration: Calibration) -> list[Row]:
    record = load_item(figure)
    if record is not None and record["config"]["calibration"] == dict(calibration.values):
        return record["results"]["rows"]
    return rows_of([bar for bar in bars_of(figure, calibration.counts) if not bar.ours], calibration.profile)


def median_errors(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By figure, over all bars, and over those of `BOUND`: the median of the errors without their sign, in percent, and
    how many there are."""
    counted = [row for row in rows if not row["used_in_calibration"] and error_percent(row) is not None]
    figures = {row["figure"]: [each for each in counted if each["figure"] == row["figure"]] for row in counted}
    bounded = [row for row in counted if row["figure"] in BOUND.split(", ")]
    return {
        name: {"median_percent": statistics.median(abs(error_percent(row) or 0.0) for row in some), "bars": len(some)}
        for name, some in (*figures.items(), ("all", counted), (BOUND, bounded))
        if some
    }


def orders(rows: Sequence[Row]) -> dict[str, Any]:
    """Of each two systems at the same place of a figure, where both have numbers and the printed gap counts."""
    right, wrong = 0, []
    for one, other in combinations(rows, 2):
        if (one["figure"], one["x"]) != (other["figure"], other["x"]) or OOM in _values(one, other):
            continue
        high, low = (one, other) if one["paper"] > other["paper"] else (other, one)
        if high["paper"] / low["paper"] <= LEAST_GAP:
            continue
        if high["value"] > low["value"]:
            right += 1
        else:
            wrong.append({"figure": one["figure"], "x": one["x"], "higher": _named(high), "lower": _named(low)})
    return {"right": right, "wrong": wrong}


def _values(*rows: Row) -> list[Any]:
    return [row[name] for row in rows for name in ("value", "paper")]


def _named(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("system", "value", "paper")}


def outs_of_memory(rows: Sequence[Row]) -> dict[str, Any]:
    """Of all bars: whether OOM is where the paper has it and nowhere else."""
    wrong = [row for row in rows if (row["value"] == OOM) != (row["paper"] == OOM)]
    printed = sum(row["paper"] == OOM for row in rows)
    return {"printed": printed, "wrong": [{"figure": row["figure"], "x": row["x"], **_named(row)} for row in wrong]}


def crossover(rows: Sequence[Row]) -> dict[str, Any]:
    """The numbers of GPUs between which the first system of `CROSSOVER` comes to lead; None where it does not once."""
    figure, first, second = CROSSOVER
    values = {(row["system"], int(row["x"])): row["value"] for row in rows if row["figure"] == figure}
    places = sorted({x for system, x in values if system == first and OOM not in (values[first, x], values[second, x])})
    leads = [values[first, x] > values[second, x] for x in places]
    turns = [(places[i], places[i + 1]) for i in range(len(places) - 1) if leads[i] != leads[i + 1]]
    between = list(turns[0]) if len(turns) == 1 and leads and leads[-1] else None
    return {"between": between, "required": list(CROSSES_BETWEEN)}


def report(results: dict[str, Any]) -> list[str]:
    lines = ["median absolute error of bars that are not in the calibration:"]
    for name, found in results["errors"].items():
        verdict = _verdict(found["median_percent"] <= MOST_ERROR_PERCENT) if name == BOUND else ""
        lines.append(f"  {name:28}{found['median_percent']:6.1f} % of {found['bars']} bars{verdict}")
    found = results["orders"]
    total = found["right"] + len(found["wrong"])
    lines.append(
        f"orders with a printed gap above 5 %: {found['right']} of {total} right{_verdict(not found['wrong'])}"
    )
    for each in found["wrong"]:
        high, low = each["higher"], each["lower"]
        lines.append(
            f"  {each['figure']} at {each['x']}: {high['system']} {high['value']:.1f} (paper {high['paper']:g}) is not "
            f"above {low['system']} {low['value']:.1f} ({low['paper']:g})"
        )
    wrong = results["oom"]["wrong"]
    lines.append(f"out of memory: {results['oom']['printed']} printed, {len(wrong)} bars wrong{_verdict(not wrong)}")
    lines += [
        f"  {each['figure']} at {each['x']}: {each['system']} {each['value']}, paper {each['paper']}" for each in wrong
    ]
    between, required = results["crossover"]["between"], results["crossover"]["required"]
    lines.append(f"ZeRO-2 comes to lead between {between} GPUs{_verdict(between == required)}")
    return lines


def _verdict(met: bool) -> str:
    return ": met" if met else ": missed"
