"""Figure 2: the data-flow graph, and the edges that the placement cuts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Patch

from paper_figures.style import BLACK, GREY, ORANGE, SKY, VERMILION

# Where nodes stand; circles hold data, boxes compute.
PLACES = {
    "FWD": (0.0, 3.0),
    "activation16": (1.2, 3.0),
    "BWD": (2.4, 3.0),
    "p16": (0.0, 2.0),
    "g16": (2.4, 2.0),
    "float2half": (0.0, 1.0),
    "p32": (1.2, 1.0),
    "update": (2.4, 1.0),
    "m32": (1.8, 0.0),
    "v32": (3.0, 0.0),
}
COMPUTES = {"FWD", "BWD", "update", "float2half"}
RADIUS = 0.3
BEND = 0.18  # of two edges between the same nodes, which run apart


def draw_flow(results: Mapping[str, Any], *, title: str) -> Figure:
    graph, on_cpu = results["graph"], set(results["on_cpu"])
    figure = Figure(figsize=(6.4, 6.2), layout="constrained")
    axes = figure.subplots()
    shapes = {node["name"]: _draw_node(axes, node, node["name"] in on_cpu) for node in graph["nodes"]}
    pairs = {(edge["source"], edge["target"]) for edge in graph["edges"]}
    for edge in graph["edges"]:
        source, target = edge["source"], edge["target"]
        both = (shapes[source], shapes[target])
        _draw_edge(axes, edge, both, cut=(source in on_cpu) != (target in on_cpu), bent=(target, source) in pairs)
    axes.set_xlim(-0.5, 3.5)
    axes.set_ylim(-0.4, 3.5)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(title, loc="left")
    handles = [
        Patch(fc=SKY, ec=BLACK, label="on the GPU"),
        Patch(fc=ORANGE, ec=BLACK, hatch="..", label="on the CPU"),
        Patch(fc=VERMILION, label=f"cut: {results['cut_bytes_per_param']:g}M bytes an iteration"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _draw_node(axes: Axes, node: Mapping[str, Any], on_cpu: bool) -> Patch:
    x, y = PLACES[node["name"]]
    look: dict[str, Any] = {"fc": ORANGE if on_cpu else SKY, "ec": BLACK, "hatch": ".." if on_cpu else "", "zorder": 3}
    corner = (x - 1.1 * RADIUS, y - 0.7 * RADIUS)
    shape = (
        FancyBboxPatch(corner, 2.2 * RADIUS, 1.4 * RADIUS, boxstyle="square,pad=0", **look)
        if node["name"] in COMPUTES
        else Circle((x, y), RADIUS, **look)
    )
    axes.add_patch(shape)
    box = {"facecolor": look["fc"], "edgecolor": "none", "pad": 0.5}
    text = node["name"].replace("activation16", "activa-\ntion16")
    axes.text(x, y, text, ha="center", va="center", fontsize=8, zorder=4, bbox=box)
    return shape


def _draw_edge(axes: Axes, edge: Mapping[str, Any], shapes: tuple[Patch, Patch], *, cut: bool, bent: bool) -> None:
    start, end = PLACES[edge["source"]], PLACES[edge["target"]]
    bend = BEND if bent else 0.0
    colour = VERMILION if cut else GREY
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            patchA=shapes[0],  # it starts and ends at the rims
            patchB=shapes[1],
            shrinkA=0,
            shrinkB=0,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=12,
            color=colour,
            lw=2.6 if cut else 1.0,
            ls="-" if cut else (0, (4, 1)),
            zorder=1,
        )
    )
    x = (start[0] + end[0]) / 2 + bend / 2 * (end[1] - start[1])
    y = (start[1] + end[1]) / 2 - bend / 2 * (end[0] - start[0])
    nbytes = edge["bytes_per_param"]
    text = "batch" if nbytes is None else f"{nbytes:g}M"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=BLACK, zorder=2, bbox=box)
