"""Records and the paper's values as pandas frames, joined where they speak of the same thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from paper_figures.records import Record

PAPER = Path(__file__).parent / "reference" / "paper.csv"
OOM = "OOM"
KEYS = ["system", "x_name", "x"]
# The types that pandas infers for its operations are unions of all that it could give.
Frame: TypeAlias = Any  # a pandas DataFrame
Column: TypeAlias = Any  # a pandas Series
COLUMNS = [*KEYS, "paper", "ours", "error", "unit", "kind", "used_in_calibration", "extrapolated", "source"]


def paper_frame(item: str) -> Frame:
    """What the paper prints or shows of an item; values are texts."""
    values = pd.read_csv(PAPER, dtype=str, keep_default_na=False)
    return values[values["item"] == item].drop(columns="item").reset_index(drop=True)


def our_frame(record: Record) -> Frame:
    """The rows of a record."""
    found = record["results"]["rows"]
    rows = pd.DataFrame(found) if found else pd.DataFrame(columns=[*KEYS, "value"], dtype=object)
    for name, default in (("used_in_calibration", False), ("extrapolated", False), ("kind", ""), ("unit", "")):
        if name not in rows:
            rows[name] = default
        rows[name] = [default if _is_none(value) else value for value in rows[name]]
    return rows.assign(x=pd.Series([_place(x) for x in rows["x"]], index=rows.index, dtype="str"))


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _place(x: Any) -> str:
    """1, 1.0 and "1" are one place of an axis."""
    return str(int(x)) if isinstance(x, float) and x.is_integer() else str(x)


def joined(item: str, record: Record) -> Frame:
    """The paper's rows in its order, each with ours, then those that only we have.

    `error` is ours over the paper's, less 1; NaN where one of them is no number. Raises ValueError where the units of a
    row differ.
    """
    papers = paper_frame(item).rename(columns={"value": "paper"})
    ours = our_frame(record)[[*KEYS, "value", "unit", "kind", "used_in_calibration", "extrapolated"]]
    ours = ours.rename(columns={"value": "ours"})
    both = papers.merge(ours, on=KEYS, how="outer", suffixes=("_paper", ""), indicator=True, sort=False)
    _check_units(item, both)
    both["unit"] = both["unit"].where(both["unit"].notna(), both["unit_paper"])
    order = {key: place for place, key in reversed(list(enumerate([*_keys(papers), *_keys(ours)])))}
    both = both.iloc[np.argsort([order[key] for key in _keys(both)], kind="stable")]
    both["error"] = number(both["ours"]) / number(both["paper"]).replace(0, np.nan) - 1
    return both[COLUMNS].reset_index(drop=True)


def _keys(frame: Frame) -> list[tuple[str, ...]]:
    return list(frame[KEYS].itertuples(index=False, name=None))


def _check_units(item: str, both: Frame) -> None:
    differ = both[(both["_merge"] == "both") & (both["unit"] != both["unit_paper"])]
    if len(differ):
        row = differ.iloc[0]
        raise ValueError(
            f"{item}: expected {row['unit_paper']!r} for {row['system']} at {row['x']}, the record has {row['unit']!r}"
        )


def number(values: Column) -> Column:
    """As numbers; NaN where they are none, such as OOM."""
    return pd.to_numeric(values, errors="coerce")


def label_of(value: Column, error: float, *, both: str = "OOM, both") -> str:
    """The error of a joined row, or who has no room."""
    if value["ours"] == OOM and value["paper"] == OOM:
        return both
    if value["ours"] == OOM:
        return "OOM" if pd.isna(value["paper"]) else "OOM here"
    if value["paper"] == OOM:
        return "OOM in the paper" if pd.notna(value["ours"]) else ""
    return f"{error:+.0%}".replace("-0%", "+0%") if pd.notna(error) else ""


def errors_of(item: str, record: Record) -> dict[str, Any]:
    """How far an item is from the paper: of all values that both have, and of those that nothing was fitted on."""
    both = joined(item, record)
    both = both[both["error"].notna()]
    unfitted = both[~both["used_in_calibration"].astype(bool)]
    worst = both.loc[both["error"].abs().idxmax()] if len(both) else None
    ooms = joined(item, record)
    ooms = ooms[(ooms["paper"] == OOM) & ooms["ours"].notna()]
    return {
        "item": item,
        "compared": len(both),
        "median_error": float(both["error"].abs().median()),
        "unfitted": len(unfitted),
        "median_unfitted": float(unfitted["error"].abs().median()),
        "worst_error": float(worst["error"]) if worst is not None else float("nan"),
        "worst_at": f"{worst['system']} at {worst['x']}" if worst is not None else "",
        "ooms": len(ooms),
        "ooms_agreeing": int((ooms["ours"] == OOM).sum()),
    }
