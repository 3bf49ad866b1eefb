"""Figures 3, 5 and 6: what the engine's streams did, from the spans of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paper_figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

# Lane, from above, and what it is.
LANES = {
    "compute": "GPU compute",
    "comm": "between GPUs",
    "down": "GPU to CPU",
    "host": "CPU",
    "up": "CPU to GPU",
}
STAGES: dict[str, tuple[str, str]] = {
    "forward": (SKY, ""),
    "backward": (BLUE, ""),
    "pack": (GREY, ""),
    "copy back": (YELLOW, ""),
    "reduce-scatter": (PURPLE, "//"),
    "all-gather": (PURPLE, "\\\\"),
    "gradients down": (ORANGE, ".."),
    "update": (VERMILION, ""),
    "statistics and sums": (GREY, "xx"),
    "values up": (GREEN, "--"),
}
SHORT = 0.004  # of the whole line


def draw_timeline(results: Mapping[str, Any], *, title: str) -> Figure:
    spans, steps = results["spans"], results["steps"]
    lanes = [lane for lane in LANES if any(span["lane"] == lane for span in spans)]
    figure = Figure(figsize=(10, 0.55 * len(lanes) + 2.0), layout="constrained")
    axes = figure.subplots()
    origin_ms = steps[0]["start_ms"]
    length_ms = max(span["stop_ms"] for span in spans) - origin_ms
    for span in spans:
        colour, hatch = STAGES.get(span["stage"], (GREY, ""))
        left, width = span["start_ms"] - origin_ms, span["stop_ms"] - span["start_ms"]
        place = len(lanes) - 1 - lanes.index(span["lane"])
        # A frame would hide the colour of what is short.
        edge = "black" if width > SHORT * length_ms else colour
        axes.barh(place, width, 0.72, left, color=colour, hatch=hatch, edgecolor=edge, lw=0.4)
    axes.set_yticks(range(len(lanes)), [LANES[lane] for lane in reversed(lanes)])
    axes.grid(axis="y", visible=False)
    _mark_steps(axes, steps, origin_ms, len(lanes))
    axes.set_xlim(0, length_ms)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", pad=18)
    used = [stage for stage in STAGES if any(span["stage"] == stage for span in spans)]
    handles = [Patch(fc=STAGES[stage][0], hatch=STAGES[stage][1], ec="black", lw=0.3, label=stage) for stage in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def _mark_steps(axes: Axes, steps: Sequence[Mapping[str, float]], origin_ms: float, top: int) -> None:
    for step in steps:
        at_ms = step["start_ms"] - origin_ms
        axes.axvline(at_ms, color="black", lw=0.8, ls="--")
        axes.text(at_ms, top - 0.45, f" step {step['step']:g}", fontsize=7, va="bottom")
