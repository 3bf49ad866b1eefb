"""Predicted bars as rows of a record, in the words of the paper's values, and as lines of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.bars.bar import Bar, Value
from experiments.calibration.free_numbers import ITEMS
from experiments.paper_values import OOM, paper_values
from zofftk.profile import Profile

UNIT = "TFLOPS/GPU"
Row = dict[str, Any]


def rows_of(bars: Sequence[Bar], profile: Profile) -> list[Row]:
    """Each with the paper's value beside it, None for a system that its figure has not."""
    return [_row(bar, profile, paper_values(bar.figure).get((bar.system, bar.x))) for bar in bars]


def _row(bar: Bar, profile: Profile, paper: Value | None) -> Row:
    value, step = bar.predict(profile)
    how = {} if step is None else {name: getattr(step, name) for name in ("ranks", "slices", "micro_batch")}
    if step is not None:
        how["micro_batches"] = step.micro_batches
    return {
        "figure": bar.figure,
        "system": bar.system,
        "x_name": bar.x_name,
        "x": bar.x,
        "value": value,
        "unit": UNIT,
        "paper": paper,
        "kind": "simulated",
        "used_in_calibration": bar.key in ITEMS,
        "ours": bar.ours,
        "step": how,
    }


def error_percent(row: Row) -> float | None:
    """None where one of the two is no number."""
    if row["paper"] in (None, OOM) or row["value"] == OOM:
        return None
    return 100 * (row["value"] / row["paper"] - 1)


def shown(rows: Sequence[Row]) -> list[str]:
    lines = [f"{'system':28}{rows[0]['x_name']:>7}{'predicted':>11}{'paper':>8}{'error':>8}  step"]
    for row in rows:
        error = error_percent(row)
        text = "" if error is None else f"{error:+.1f}%"
        how = row["step"]
        step = f"{how['micro_batches']} x {how['micro_batch']}, {how['slices']} slices" if how else ""
        used = "; in calibration" if row["used_in_calibration"] else ""
        paper = "" if row["paper"] is None else _text(row["paper"])
        lines.append(f"{row['system']:28}{row['x']:>7}{_text(row['value']):>11}{paper:>8}{text:>8}  {step}{used}")
    return lines


def _text(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:.1f}"
