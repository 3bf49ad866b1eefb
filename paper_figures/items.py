"""Every table and figure: what it is called, what it shows, and who draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from paper_figures.bars import draw_bars, draw_panels
from paper_figures.curves import draw_curves
from paper_figures.flow import draw_flow
from paper_figures.frames import KEYS, joined, our_frame, paper_frame
from paper_figures.rates import draw_rates
from paper_figures.records import Record
from paper_figures.scaling import draw_scaling
from paper_figures.shards import draw_shards
from paper_figures.tables import across, beside, draw_table, shown
from paper_figures.timelines import draw_timeline

TFLOPS = "TFLOPS per GPU"
BARS = "A bar is ours, the dark mark on it the paper's value, the text the error. "
SPANS = "Every box is an operation of a stream, as the engine issued it. "


@dataclass(frozen=True)
class Item:
    """`note` says how to read it, and where the paper is not followed to the letter."""

    name: str
    title: str
    note: str
    draw: Callable[[str, Record], Figure]
    data: Callable[[str, Record], pd.DataFrame] = joined

    @property
    def heading(self) -> str:
        return f"{self.name}: {self.title}" if self.name else self.title


def _bars(y_label: str, *, log: bool = False) -> Callable[[str, Record], Figure]:
    return lambda item, record: draw_bars(joined(item, record), title=ITEMS[item].heading, y_label=y_label, log=log)


def _table(system: str, what: str) -> Callable[[str, Record], Figure]:
    return lambda item, record: draw_table(
        beside(joined(item, record), system=system, what=what), title=ITEMS[item].heading
    )


def _models(item: str, record: Record) -> Figure:
    title = f"{ITEMS[item].heading}; in brackets the paper's, where it differs"
    return draw_table(across(joined(item, record)), title=title)


def _timeline(item: str, record: Record) -> Figure:
    return draw_timeline(record["results"], title=ITEMS[item].heading)


def _spans(item: str, record: Record) -> pd.DataFrame:
    return pd.DataFrame(record["results"]["spans"])


def _curves(item: str, record: Record) -> Figure:
    return draw_curves(record["results"]["curves"], paper_frame(item), title=ITEMS[item].heading)


def _curve_points(item: str, record: Record) -> pd.DataFrame:
    return pd.concat(
        [
            pd.DataFrame({"step": curve["step"], "loss": curve["loss"]}).assign(
                model=curve["model"], update=curve["update"], seeds=curve["seeds"]
            )
            for curve in record["results"]["curves"]
        ]
    )


def _sides(item: str, record: Record) -> Figure:
    """Latencies by size, and beside each what it means."""
    sides = pd.DataFrame(record["results"]["sides"]).set_index("side")
    values = joined(item, record)
    seconds = values.pivot_table(index="system", columns="x", values="ours", aggfunc="first", sort=False)
    papers = values.pivot_table(index="system", columns="x", values="paper", aggfunc="first", sort=False)
    marks = values.pivot_table(index="system", columns="x", values="extrapolated", aggfunc="first", sort=False)
    names = {"CPU-Adam": "zofftk", "PT-CPU": "torch loop"}
    cells = []
    for system in dict.fromkeys(values["system"]):
        side = sides.loc[names.get(system, system)] if names.get(system, system) in sides.index else None
        own = "" if side is None else f" = {side.name}" if side.name != system else ""
        row = {"": f"{system}{own}"}
        for x in dict.fromkeys(values["x"]):
            ours = shown(seconds.loc[system, x], 3) if system in seconds.index else ""
            mark = "*" if ours and marks.loc[system, x] else ""
            paper = shown(papers.loc[system, x], 3) if system in papers.index else ""
            row[f"{x}, s"] = f"{ours}{mark}" + (f" ({paper})" if paper else "")
        if side is not None:
            row |= {
                "ns/param": shown(side["ns_per_param"], 3),
                "B/param": shown(side["bytes_per_param"]),
                "of streaming": f"{side['share_of_stream']:.0%}",
                "spread": f"{side['spread']:.0%}",
            }
        cells.append(row)
    title = f"{ITEMS[item].heading}; in brackets the paper's, * extrapolated"
    return draw_table(pd.DataFrame(cells).fillna(""), title=title)


def _numbers(item: str, record: Record) -> pd.DataFrame:
    return pd.DataFrame(record["results"]["numbers"])


def _calibration(item: str, record: Record) -> Figure:
    cells = _numbers(item, record).map(lambda value: shown(value) if not isinstance(value, str) else value)
    return draw_table(cells, title=ITEMS[item].heading)


def _own_rows(item: str, record: Record) -> pd.DataFrame:
    return our_frame(record)


def _in_small(item: str, record: Record) -> Figure:
    """Measured bars, and on them what the dry run of the same schedule says."""
    rows = our_frame(record)
    panels = {}
    for figure, of_figure in rows.groupby("figure", sort=False):
        measured, predicted = (of_figure[of_figure["kind"] == kind] for kind in ("measured", "simulated"))
        both = measured.merge(predicted[[*KEYS, "value"]], on=KEYS, suffixes=("", "_predicted"))
        error = both["value"] / both["value_predicted"] - 1
        both = both.rename(columns={"value": "ours", "value_predicted": "paper"}).assign(error=error)
        panels[ITEMS[str(figure)].name if str(figure) in ITEMS else str(figure)] = both
    mark = "its dry run, with the difference"
    return draw_panels(panels, title=ITEMS[item].heading, y_label="TFLOPS", mark=mark)


ITEMS: dict[str, Item] = {
    "table1": Item(
        "Table 1",
        "GPU memory of the placements with the least traffic",
        "Found by trying every placement. The paper prints 4M bytes for the last row, a misprint: 2M are left, which "
        "its own reduction of 8x says too; the error is against 2M.",
        _table("offloaded", "quantity"),
    ),
    "table2": Item(
        "Table 2",
        "the machines",
        "Ours for the DGX-2 node is the profile that simulations run on. Its PCIe is what was reached one way and the "
        "other, not the datasheet's sum; its matrix products are what large ones reach, before the calibration. A "
        "GPU's GB are GiB. This machine's rows are measured.",
        _table("machine", "property"),
    ),
    "table3": Item(
        "Table 3",
        "the models",
        "Parameters without embeddings are what the paper's names count. The table cuts 40 and 60 billion parameters "
        "over 2 GPUs, which cannot hold even the 16-bit parameters; ours is the smallest degree with which the printed "
        "batch fits in the memory of ZeRO-Offload as released.",
        _models,
    ),
    "table4": Item(
        "Table 4",
        "latency of one Adam step on the CPU",
        "CPU-Adam is our kernel (fp32 moments, 16-bit gradients in and 16-bit values out), PT-CPU torch's plain loop, "
        "which is what torch had when the paper was written. Streaming is the fastest loop that moves the same 28 "
        "bytes a parameter. This machine has two cores where the paper's had 48. At 67 million parameters, in huge "
        "pages, ratios are somewhat larger (README, Numbers).",
        _sides,
    ),
    "fig2": Item(
        "Figure 2",
        "the data-flow graph and its cut",
        "M is the number of parameters.",
        (lambda item, record: draw_flow(record["results"], title=ITEMS[item].heading)),
    ),
    "fig3": Item(
        "Figure 3",
        "a step on one GPU",
        SPANS + "The paper labels the swap of parameters GPU->CPU, a misprint: values go up.",
        _timeline,
        _spans,
    ),
    "fig4": Item(
        "Figure 4",
        "what each rank holds",
        "The engine's own layout, with buckets large enough to be seen. Every GPU holds all 16-bit parameters; its "
        "host holds gradients and fp32 states of its own shards alone.",
        lambda item, record: draw_shards(record["results"], title=ITEMS[item].heading),
        lambda item, record: pd.DataFrame(record["results"]["shards"]),
    ),
    "fig5": Item(
        "Figure 5", "a step of one of four ranks", SPANS + "The paper gives it as a program.", _timeline, _spans
    ),
    "fig6": Item(
        "Figure 6",
        "the delayed update",
        SPANS + "The first step shown is the last synchronous one; the update of the second runs beside the third.",
        _timeline,
        _spans,
    ),
    "fig7": Item(
        "Figure 7",
        "the largest model that each system trains",
        BARS + "zero3, deepspeed and zofftk are not in the paper's figure. The ladder of sizes ends at 100.",
        _bars("billions of parameters", log=True),
    ),
    "fig8": Item(
        "Figure 8",
        "throughput on one GPU",
        BARS + "The paper's are read off its figure, within 0.3; its axis begins at 20. 512 samples a step.",
        _bars(TFLOPS),
    ),
    "fig9": Item(
        "Figure 9",
        "throughput with the delayed update and without",
        BARS + "The text's gain of up to 1.59x is not in the paper's figure, whose largest is 1.24x.",
        _bars(TFLOPS),
    ),
    "fig10": Item("Figure 10", "throughput on 16 GPUs", BARS, _bars(TFLOPS)),
    "fig11": Item(
        "Figure 11",
        "throughput on 1 to 128 GPUs",
        "Filled marks are ours, hollow ones the paper's. Between nodes, at the 4.4 GB/s that the fit finds for them, "
        "our engine falls behind ZeRO-Offload as released; docs/figures.md says what is known of it.",
        lambda item, record: draw_scaling(joined(item, record), title=ITEMS[item].heading),
    ),
    "fig12": Item(
        "Figure 12",
        "loss of pre-training",
        "Another model and other data than the paper's, which it does not state: only the relation between the curves "
        "can be compared.",
        _curves,
        _curve_points,
    ),
    "fig13": Item(
        "Figure 13",
        "loss of fine-tuning",
        "A smaller BERT and another task than the paper's SQuAD: only the relation between the curves can be compared.",
        _curves,
        _curve_points,
    ),
    "fig14": Item(
        "Figure 14",
        "throughput by batch size, technique by technique",
        BARS + "The paper does not say how many micro-batches a step has.",
        _bars(TFLOPS),
    ),
    "delay_rates": Item(
        "",
        "The delay by learning rate and optimizer",
        "Not in the paper. Means over seeds with their standard deviation; what diverged is left out.",
        (lambda item, record: draw_rates(our_frame(record), title=ITEMS[item].heading)),
        _own_rows,
    ),
    "throughput_small": Item(
        "",
        "Throughput in small, on the emulated device",
        "A bar is measured: compute sleeps, links are timed, updates are real, all slowed alike; it is given as the "
        "throughput of the large model, by 96·B·s·L·h² and on the profile before its calibration, so it is not that of "
        "Figures 8 to 14. The mark on it is the dry run of the same schedule.",
        _in_small,
        _own_rows,
    ),
    "calibration": Item(
        "",
        "The simulation's free numbers",
        "What each was fitted on is left out of the errors named unfitted.",
        _calibration,
        _numbers,
    ),
}
