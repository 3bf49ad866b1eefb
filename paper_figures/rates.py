"""Final losses by learning rate: a panel for each optimizer, a line for each kind of update, bars over seeds."""

from __future__ import annotations

from matplotlib.figure import Figure

from paper_figures.curves import COLOURS
from paper_figures.frames import Frame, number
from paper_figures.style import LINES


def draw_rates(rows: Frame, *, title: str) -> Figure:
    """`rows` have `optimizer`, `update`, `x` (the rate), `value` (a loss, or a word) and `sd`."""
    rows = rows.assign(lr=number(rows["x"]), loss=number(rows["value"])).dropna(subset="loss")
    optimizers = list(dict.fromkeys(rows["optimizer"]))
    updates = list(dict.fromkeys(rows["update"]))
    figure = Figure(figsize=(3.4 * len(optimizers), 3.4), layout="constrained")
    grid = figure.subplots(1, len(optimizers), squeeze=False)[0]
    for axes, optimizer in zip(grid, optimizers, strict=True):
        for place, update in enumerate(updates):
            line = rows[(rows["optimizer"] == optimizer) & (rows["update"] == update)].sort_values("lr")
            look = {"color": COLOURS[place], "ls": LINES[place % len(LINES)], "marker": "os^D"[place % 4]}
            spread = line["sd"].astype(float)
            axes.errorbar(line["lr"], line["loss"], yerr=spread, label=update, ms=4, lw=1.3, capsize=2, **look)
        axes.set_xscale("log")
        rates = sorted(set(rows[rows["optimizer"] == optimizer]["lr"]))
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set_title(optimizer, fontsize=9)
        axes.set_xlabel("learning rate")
    grid[0].set_ylabel("held-out loss, nats")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure
