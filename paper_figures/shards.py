"""Figure 4: how the parameters are divided among the ranks, and what each of them then holds where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures.style import BLUE, GREEN, ORANGE, SKY, VERMILION, YELLOW, look_of

RANKS = ((SKY, ""), (ORANGE, ".."), (GREEN, "//"), (YELLOW, "xx"))
PARTS = {"gradients": ORANGE, "master": BLUE, "exp_avg": VERMILION, "exp_avg_sq": GREEN}


def draw_shards(results: Mapping[str, Any], *, title: str) -> Figure:
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    line, held = figure.subplots(2, 1, height_ratios=(1, 1.4))
    _draw_line(line, results)
    _draw_held(held, pd.DataFrame(results["rows"]))
    line.set_title(title, loc="left")
    return figure


def _draw_line(axes: Axes, results: Mapping[str, Any]) -> None:
    """The parameters as they lie, the last first: a bucket is one round of the ranks."""
    at, labelled = 0.0, set()
    for shard in results["shards"]:
        rank, size = shard["rank"], shard["numel"] / 1e6
        colour, hatch = RANKS[rank] if rank < len(RANKS) else look_of("", rank)
        label = None if rank in labelled else f"rank {rank}"
        labelled.add(rank)
        axes.barh(0, size, 0.8, at, color=colour, hatch=hatch, ec="black", lw=0.4, label=label)
        at += size
    axes.set_yticks([])
    axes.set_xlim(0, at)
    axes.grid(visible=False)
    axes.set_xlabel("parameters in the order that backward delivers them, millions: owner on the host")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_held(axes: Axes, rows: pd.DataFrame) -> None:
    gpu = rows[rows["x_name"] == "on the GPU"]["value"].sum()
    host = rows[rows["x_name"] == "on the host"]
    ranks = list(dict.fromkeys(host["system"]))
    for place, rank in enumerate(ranks):
        axes.bar(place - 0.2, gpu, 0.36, color=SKY, ec="black", lw=0.5, label="" if place else "GPU: 16-bit parameters")
        bottom = 0.0
        for part, colour in PARTS.items():
            size = host[(host["system"] == rank) & (host["x"] == part)]["value"].sum()
            label = "" if place else f"host: {part}"
            axes.bar(place + 0.2, size, 0.36, bottom, color=colour, ec="black", lw=0.5, label=label)
            bottom += size
    axes.set_xticks(range(len(ranks)), ranks)
    axes.set_ylabel("GB")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
