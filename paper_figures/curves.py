"""Figures 12 and 13: smoothed loss curves of each kind of update, and the gap to the synchronous one below them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from paper_figures.frames import Frame
from paper_figures.style import BLACK, BLUE, GREEN, LINES, ORANGE, VERMILION

REFERENCE = "synchronous"
COLOURS = (BLACK, BLUE, VERMILION, GREEN, ORANGE)
PAPER_TITLE = "the paper's, digitised"


def draw_curves(curves: Sequence[dict[str, Any]], papers: Frame, *, title: str) -> Figure:
    """A column for each model, and one for the few points that can be read off the paper's figure."""
    models = list(dict.fromkeys(curve["model"] for curve in curves))
    figure = Figure(figsize=(3.6 * (len(models) + 1), 4.6), layout="constrained")
    grid = figure.subplots(2, len(models) + 1, squeeze=False, height_ratios=(3, 1))
    labels = list(dict.fromkeys(curve["update"] for curve in curves))
    for column, model in enumerate(models):
        _draw_model(grid[:, column], [curve for curve in curves if curve["model"] == model], labels, model)
    _draw_papers(grid[:, -1], papers)
    grid[0, 0].set_ylabel("loss, nats")
    grid[1, 0].set_ylabel(f"above {REFERENCE}")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    return figure


def _draw_model(axes, curves: list[dict[str, Any]], labels: list[str], model: str) -> None:
    by_label = {curve["update"]: curve for curve in curves}
    reference = by_label.get(REFERENCE)
    for label, curve in by_label.items():
        place = labels.index(label)
        look = {"color": COLOURS[place % len(COLOURS)], "ls": LINES[place % len(LINES)], "lw": 1.3}
        seeds = f", {curve['seeds']} seeds" if curve["seeds"] > 1 else ""
        axes[0].plot(curve["step"], curve["loss"], label=f"{label}{seeds}", **look)
        if reference is not None and curve is not reference:
            gap = np.interp(curve["step"], reference["step"], reference["loss"])
            axes[1].plot(curve["step"], np.asarray(curve["loss"]) - gap, **look)
    axes[1].axhline(0, color=BLACK, lw=0.6)
    axes[0].set_title(f"{model}, means over {curves[0]['smoothed_over']} steps", fontsize=9)
    axes[1].set_xlabel("step")


def _draw_papers(axes, papers: Frame) -> None:
    points = papers[papers["x_name"] == "step"]
    axes[0].plot(points["x"].astype(int), points["value"].astype(float), "o-", color=BLACK, mfc="white", lw=0.8)
    axes[0].set_title(PAPER_TITLE, fontsize=9)
    axes[0].set_xlabel("step")
    axes[1].axis("off")
    if len(points):
        axes[1].text(0, 0.4, f"{points['system'].iloc[0]}: another model,\nother data", fontsize=8)
