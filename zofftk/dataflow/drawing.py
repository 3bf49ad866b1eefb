"""The data-flow graph as a picture, with the two sides of a placement and the edges it cuts."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zofftk.atomic_file import replacing
from zofftk.dataflow.formats import in_m
from zofftk.dataflow.graph import Compute
from zofftk.errors import InputError

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

    from zofftk.dataflow.optimum import Optimum

FORMATS = (".svg", ".png")
GPU_COLOUR, CPU_COLOUR, CUT_COLOUR, KEPT_COLOUR = "#cfe8cf", "#fbe0b5", "#c22f2f", "#666666"
# Where nodes stand, by role; the nodes of a second part stand a column width to the right.
SHARED_PLACES = {"forward": (0.0, 3.0), "activations": (1.0, 3.0), "backward": (2.0, 3.0)}
PLACES = {
    "parameter": (0.0, 2.0),
    "gradient": (2.0, 2.0),
    "cast": (0.0, 1.0),
    "master": (1.0, 1.0),
    "update": (2.0, 1.0),
    "momentum": (1.5, 0.0),
    "variance": (2.5, 0.0),
}
FUSED_PLACES = {"parameter": (0.0, 2.0), "gradient": (2.0, 2.0)}
FUSED_FWD_BWD, FUSED_UPDATE = (1.0, 3.0), (1.0, 1.0)
PART_WIDTH = 3.5
RADIUS = 0.3
BEND = 0.18  # of two edges between the same nodes, which run apart


@dataclass(frozen=True)
class Panel:
    """One picture of a graph, next to others: what is on the CPU, and what stands above it."""

    graph: nx.DiGraph
    on_cpu: Collection[str]
    title: str


def panels_of(optimum: Optimum, on_cpu: Collection[str]) -> list[Panel]:
    """The whole graph, and beside it the super nodes, unless a placement divides one of them."""
    panels = [Panel(optimum.graph, on_cpu, f"On the CPU: {', '.join(on_cpu) or 'nothing'}")]
    fused_on_cpu = []
    for super_node, members in optimum.fused_graph.nodes(data="members"):
        sides = {name in on_cpu for name in members}
        if len(sides) > 1:
            return panels
        fused_on_cpu += [super_node] * sides.pop()
    return [*panels, Panel(optimum.fused_graph, fused_on_cpu, "Super nodes")]


def write_drawing(path: Path, panels: Sequence[Panel]) -> None:
    """Draws `panels` side by side into an SVG or PNG file, the same bytes each time.

    Raises InputError where the name of `path` ends otherwise, and OSError where it cannot be written.
    """
    # Drawing is slow to import.
    import matplotlib
    from matplotlib.figure import Figure

    kind = check_format(path)
    # An SVG file holds random names and the time unless told otherwise.
    with matplotlib.rc_context({"svg.hashsalt": "zofftk", "svg.fonttype": "path"}):
        widths = [_width(panel.graph) for panel in panels]
        figure = Figure(figsize=(1.6 * sum(widths), 6.4), layout="constrained")
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0], panels, strict=True
        ):
            draw_graph(axes, panel)
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None)
    with replacing(path) as file:
        file.write(picture.getvalue())


def check_format(path: Path) -> str:
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"expected a file name that ends in {' or '.join(FORMATS)}, got {path}")
    return path.suffix.lower()[1:]


def draw_graph(axes: Axes, panel: Panel) -> None:
    """Circles hold data, boxes compute; edges carry their bytes per iteration, and those that are cut stand out."""
    graph, places = panel.graph, _places(panel.graph)
    shapes = {
        name: _draw_node(axes, places[name], name, attributes["compute"], on_cpu=name in panel.on_cpu)
        for name, attributes in graph.nodes(data=True)
    }
    link = Fraction(0)
    for source, target, flow in graph.edges(data=True):
        cut = (source in panel.on_cpu) != (target in panel.on_cpu)
        link += flow["bytes_per_param"] * cut
        text = "batch" if flow["activations"] else in_m(flow["bytes_per_param"])
        bend = BEND if graph.has_edge(target, source) else 0.0
        _draw_edge(axes, shapes[source], shapes[target], (places[source], places[target]), text, cut=cut, bend=bend)
    axes.set_title(f"{panel.title}\n{in_m(link)} bytes cross the link in each iteration", fontsize=10)
    axes.set_xlim(-0.6, max(x for x, _ in places.values()) + 0.6)
    axes.set_ylim(-0.5, 3.5)
    axes.set_aspect("equal")
    axes.axis("off")


def _places(graph: nx.DiGraph) -> dict[str, tuple[float, float]]:
    parts = _parts(graph)
    middle = PART_WIDTH * (len(parts) - 1) / 2
    places = {}
    for name, attributes in graph.nodes(data=True):
        role, members = attributes["role"], attributes.get("members", ())
        right = PART_WIDTH * parts.index(_part(name)) if _part(name) in parts else 0.0
        if role in SHARED_PLACES:
            x, y = SHARED_PLACES[role]
            right = middle
        elif attributes["compute"] == Compute.MB:
            x, y = FUSED_FWD_BWD
            right = middle
        elif members and attributes["compute"] == Compute.M:
            x, y = FUSED_UPDATE
        else:
            x, y = PLACES[role]
        places[name] = (x + right, y)
    return places


def _part(name: str) -> str:
    return name.partition(".")[2]


def _parts(graph: nx.DiGraph) -> list[str]:
    """The endings of the parts that nodes belong to; forward and backward belong to all."""
    return list(dict.fromkeys(_part(name) for name, role in graph.nodes(data="role") if role == "gradient"))


def _width(graph: nx.DiGraph) -> float:
    return max(x for x, _ in _places(graph).values()) + 1.2


def _draw_node(axes: Axes, place: tuple[float, float], name: str, compute: Compute, *, on_cpu: bool) -> Patch:
    from matplotlib.patches import Circle, FancyBboxPatch

    x, y = place
    style: dict[str, Any] = {"facecolor": CPU_COLOUR if on_cpu else GPU_COLOUR, "edgecolor": "black", "zorder": 3}
    corner = (x - 1.1 * RADIUS, y - 0.7 * RADIUS)
    shape = (
        Circle(place, RADIUS, **style)
        if compute == Compute.NONE
        else FancyBboxPatch(corner, 2.2 * RADIUS, 1.4 * RADIUS, boxstyle="square,pad=0", **style)
    )
    axes.add_patch(shape)
    text = name.replace(".", "\n.").replace("activation", "activa-\ntion")
    axes.text(x, y, f"{text}\n{'CPU' if on_cpu else 'GPU'}", ha="center", va="center", fontsize=7, zorder=4)
    return shape


def _draw_edge(
    axes: Axes,
    source: Patch,
    target: Patch,
    ends: tuple[tuple[float, float], tuple[float, float]],
    text: str,
    *,
    cut: bool,
    bend: float,
) -> None:
    from matplotlib.patches import FancyArrowPatch

    colour = CUT_COLOUR if cut else KEPT_COLOUR
    arrow = FancyArrowPatch(
        *ends,
        patchA=source,  # it starts and ends at the rims
        patchB=target,
        shrinkA=0,
        shrinkB=0,
        connectionstyle=f"arc3,rad={bend}",
        arrowstyle="-|>",
        mutation_scale=12,
        color=colour,
        linewidth=2.2 if cut else 1.0,
        zorder=1,
    )
    axes.add_patch(arrow)
    (start_x, start_y), (end_x, end_y) = ends
    x = (start_x + end_x) / 2 + bend / 2 * (end_y - start_y)
    y = (start_y + end_y) / 2 - bend / 2 * (end_x - start_x)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour, zorder=2, bbox=box)
