"""Figure 11: throughput of a GPU, and of all together, over their number; ours are lines, the paper's hollow marks."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures.frames import Frame, label_of, number
from paper_figures.style import BLACK, GREY, LINES, look_of

MARKS = ("o", "s", "^", "D")


def draw_scaling(values: Frame, *, title: str) -> Figure:
    values = values.drop_duplicates(["system", "x"])
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    of_one, of_all = figure.subplots(1, 2)
    for place, system in enumerate(dict.fromkeys(values["system"])):
        of_system = values[values["system"] == system]
        gpus, colour = of_system["x"].astype(int), look_of(system, place)[0]
        mark, line = MARKS[place % len(MARKS)], LINES[place % len(LINES)]
        for axes, factor in ((of_one, 1), (of_all, gpus)):
            ours, papers = number(of_system["ours"]) * factor, number(of_system["paper"]) * factor
            axes.plot(gpus[ours.notna()], ours.dropna(), line, color=colour, marker=mark, label=f"{system}, ours")
            if papers.notna().any():
                axes.plot(
                    gpus[papers.notna()],
                    papers.dropna(),
                    ls="none",
                    marker=mark,
                    mfc="white",
                    mec=BLACK,
                    ms=8,
                    label=f"{system}, the paper",
                )
        fitted = of_system[of_system["used_in_calibration"].map(str) == "True"]
        if len(fitted):
            look = {"ls": "none", "marker": "s", "ms": 15, "mfc": "none", "mec": GREY, "mew": 1.2}
            of_one.plot(fitted["x"].astype(int), number(fitted["ours"]), label="fitted on the paper's value", **look)
    _say_errors(of_one, values)
    for axes, y_label in ((of_one, "TFLOPS per GPU"), (of_all, "TFLOPS of all GPUs")):
        ticks = sorted(set(values["x"].astype(int)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("GPUs")
        axes.set_ylabel(y_label)
    of_one.set_ylim(0)
    of_all.set_yscale("log", base=10)
    of_one.set_title(title, loc="left")
    handles, labels = of_one.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _say_errors(axes: Axes, values: Frame) -> None:
    """Below the lines, a row for each system that the paper has too: our error, or who has no room."""
    compared = values[values["paper"].notna()]
    for place, (system, rows) in enumerate(compared.groupby("system", sort=False)):
        height = 0.03 + 0.11 * place
        axes.text(0.02, height + 0.05, f"{system}, ours against the paper's:", transform=axes.transAxes, fontsize=7)
        for _, value in rows.iterrows():
            says = label_of(value, value["error"], both="OOM")
            axes.text(int(value["x"]), height, says, transform=axes.get_xaxis_transform(), ha="center", fontsize=7)
