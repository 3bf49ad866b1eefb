"""Figures 7 to 11 and 14: a bar for each system and place is ours, a dark mark on it the paper's value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from paper_figures.frames import Column, Frame, label_of, number
from paper_figures.style import BLACK, look_of

X_LABELS = {"params": "parameters", "gpus": "GPUs", "batch": "batch size"}
LEGEND_INCHES = 2.1  # of a column
BAR_INCHES = 0.2
GROUP = 0.86  # of the room of a place, which its bars share
PAPERS = "the paper's value, with our error"
Look = tuple[str, str]  # colour and hatch
# What was fitted on the paper's value: its error proves nothing.
FITTED: dict[str, Any] = {"edgecolor": BLACK, "lw": 2.0, "ls": ":"}


def draw_bars(values: Frame, *, title: str, y_label: str, log: bool = False) -> Figure:
    """`values` is a joined frame with one x_name."""
    systems, places = list(dict.fromkeys(values["system"])), list(dict.fromkeys(values["x"]))
    width = max(6.4, BAR_INCHES * _most_at_a_place(values) * len(places) + 1.6)
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    axes = figure.subplots()
    looks = looks_of(systems)
    _draw_panel(axes, values, looks, log=log)
    axes.set_ylabel(y_label)
    axes.set_title(title, loc="left")
    _legend(figure, looks, PAPERS, some_fitted=any(is_fitted(value) for _, value in values.iterrows()))
    return figure


def draw_panels(panels: Mapping[str, Frame], *, title: str, y_label: str, mark: str) -> Figure:
    """One below the other; `mark` says what stands where the paper's value does elsewhere."""
    figure = Figure(figsize=(9, 2.6 * len(panels) + 1.2), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    looks = looks_of(system for values in panels.values() for system in values["system"])
    for axes, (name, values) in zip(grid, panels.items(), strict=True):
        _draw_panel(axes, values, looks, log=False)
        axes.set_ylabel(y_label)
        axes.set_title(name, loc="left", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    _legend(figure, looks, mark)
    return figure


def looks_of(systems: Iterable[str]) -> dict[str, Look]:
    """Of each system once, so that panels and legend agree."""
    return {system: look_of(system, number_) for number_, system in enumerate(dict.fromkeys(systems))}


def _draw_panel(axes: Axes, values: Frame, looks: Mapping[str, Look], *, log: bool) -> None:
    values = values.drop_duplicates(["system", "x"])
    systems, places = list(dict.fromkeys(values["system"])), list(dict.fromkeys(values["x"]))
    low, high = _range(values, log)
    width = GROUP / _most_at_a_place(values)
    for place, x in enumerate(places):
        at_place = values[values["x"] == x].set_index("system")
        present = [system for system in systems if system in at_place.index]
        for number_, system in enumerate(present):
            middle = place + (number_ - (len(present) - 1) / 2) * width
            _draw_one(axes, at_place.loc[system], middle, width, looks[system], low)
    axes.set_xticks(range(len(places)), places)
    axes.set_xlim(-0.6, len(places) - 0.4)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(low, high)
    x_name = str(values["x_name"].iloc[0])
    axes.set_xlabel(X_LABELS.get(x_name, x_name))


def _most_at_a_place(values: Frame) -> int:
    return int(values.groupby("x")["system"].nunique().max())


def _range(values: Frame, log: bool) -> tuple[float, float]:
    every = [float(value) for name in ("ours", "paper") for value in number(values[name]).dropna()]
    if log:
        return min(every) / 1.6, max(every) * 2.2
    return 0.0, max(every) * 1.18


def _draw_one(axes: Axes, value: Column, middle: float, width: float, look: Look, low: float) -> None:
    ours, papers, error = number(value[["ours", "paper", "error"]])
    colour, hatch = look
    top = low
    if pd.notna(ours):
        axes.bar(middle, ours - low, 0.92 * width, low, color=colour, hatch=hatch, edgecolor="black", lw=0.5)
        if is_fitted(value):
            axes.bar(middle, ours - low, 0.92 * width, low, fill=False, **FITTED)
        top = ours
    if pd.notna(papers):
        axes.plot([middle - width / 2, middle + width / 2], [papers, papers], color="white", lw=3.2, zorder=3)
        axes.plot([middle - width / 2, middle + width / 2], [papers, papers], color=BLACK, lw=1.8, zorder=4)
        top = max(top, papers)
    says = label_of(value, error)
    if says:
        axes.annotate(
            says, (middle, top), (0, 3), textcoords="offset points", rotation=90, ha="center", va="bottom", fontsize=6
        )


def is_fitted(value: Column) -> bool:
    return value["used_in_calibration"] in (True, "True")


def _legend(figure: Figure, looks: Mapping[str, Look], mark: str, *, some_fitted: bool = False) -> None:
    handles: list = []
    for system, (colour, hatch) in looks.items():
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.5, label=system))
    handles.append(Line2D([], [], color=BLACK, lw=1.8, label=mark))
    if some_fitted:
        handles.append(Patch(fill=False, label="fitted on the paper's value", **FITTED))
    columns = int(figure.get_figwidth() // LEGEND_INCHES)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))
