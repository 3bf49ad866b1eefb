"""Tables as pictures: ours, with the paper's value and the error beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from paper_figures.frames import Frame, number

HEAD, ODD = "#d9e6f2", "#f5f5f5"
ROW_INCHES, COLUMN_INCHES = 0.24, 1.3


def draw_table(cells: pd.DataFrame, *, title: str, widths: Sequence[float] | None = None) -> Figure:
    """`cells` are texts."""
    widths = widths or [_width(cells, name) for name in cells.columns]
    figure = Figure(figsize=(max(4.0, sum(widths)), ROW_INCHES * (len(cells) + 1) + 0.7))
    axes = figure.add_axes((0.01, 0.02, 0.98, 1 - 0.5 / figure.get_figheight()))
    axes.axis("off")
    axes.set_title(title, loc="left")
    table = axes.table(
        cellText=cells.values.tolist(),
        colLabels=list(cells.columns),
        colWidths=[width / sum(widths) for width in widths],
        cellLoc="left",
        loc="upper left",
        bbox=Bbox.unit(),
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    for (row, _), cell in table.get_celld().items():
        cell.set_edgecolor("#bbbbbb")
        cell.set_facecolor(HEAD if row == 0 else ODD if row % 2 == 0 else "white")
    return figure


def across(values: Frame) -> pd.DataFrame:
    """A joined frame as cells, one row for each system; in brackets the paper's value where it is another."""
    rows = []
    for system, of_system in values.groupby("system", sort=False):
        row = {"": str(system)}
        for _, value in of_system.iterrows():
            unit = str(value["unit"] or "").removesuffix(" params")
            ours, papers = shown(value["ours"]), shown(value["paper"])
            row[f"{value['x']}, {unit}" if unit else value["x"]] = (
                f"{ours} ({papers})" if papers and papers != ours else ours
            )
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _width(cells: pd.DataFrame, name: str) -> float:
    longest = max([len(str(name)), *(len(str(text)) for text in cells[name])])
    return 0.25 + 0.068 * longest


def shown(value: object, digits: int = 4) -> str:
    """A number without noise; nothing where there is none."""
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return ""
    as_number = number(pd.Series([value])).iloc[0]
    return str(value) if pd.isna(as_number) else f"{as_number:.{digits}g}"


def beside(values: Frame, *, system: str, what: str) -> pd.DataFrame:
    """A joined frame as cells."""
    return pd.DataFrame(
        {
            system: values["system"],
            what: values["x"],
            "the paper": [shown(value) for value in values["paper"]],
            "ours": [shown(value) for value in values["ours"]],
            "unit": values["unit"].fillna(""),
            "error": [f"{error:+.1%}" if pd.notna(error) else "" for error in number(values["error"])],
            "ours is": values["kind"].fillna(""),
        }
    )
