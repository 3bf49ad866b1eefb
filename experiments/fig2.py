"""Figure 2: the data-flow graph of mixed-precision training with Adam, and the edges that the placement cuts."""

import argparse
from typing import Any

from experiments.record import keep
from experiments.rows import row
from zofftk.dataflow.assumptions import PAPER
from zofftk.dataflow.optimum import Optimum
from zofftk.dataflow.record import record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""


def run(options: argparse.Namespace) -> int:
    found = record(Optimum(PAPER))
    graph, on_cpu = found["graph"], set(found["zero_offload"]["on_cpu"])
    cut = [edge for edge in graph["edges"] if (edge["source"] in on_cpu) != (edge["target"] in on_cpu)]
    rows = [_edge_row(edge, edge in cut) for edge in graph["edges"]]
    for each in rows:
        print(f"{each['x']:28}{each['value']!s:>6} {each['unit']}{'  cut' if each['cut'] else ''}")
    crossing = sum(edge["bytes_per_param"] for edge in cut)
    print(f"cut: {crossing} bytes a parameter in each iteration")
    results = {"rows": rows, "graph": graph, "on_cpu": sorted(on_cpu), "cut_bytes_per_param": crossing}
    print("record:", keep("fig2", {"assumptions": found["assumptions"]}, None, results))
    return 0


def _edge_row(edge: dict[str, Any], is_cut: bool) -> dict[str, Any]:
    value = "batch" if edge["bytes_per_param"] is None else edge["bytes_per_param"]
    name = f"{edge['source']} -> {edge['target']}"
    return row("data-flow graph", "edge", name, value, "B/param", "computed", cut=is_cut)
