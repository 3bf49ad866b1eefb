"""What the enumeration shows, as tables and sentences for people."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rich.console import Console
from rich.table import Table

from zofftk.dataflow.assumptions import PAPER, Assumptions
from zofftk.dataflow.formats import in_m, listed, times
from zofftk.dataflow.optimum import Optimum
from zofftk.dataflow.placements import Placement
from zofftk.dataflow.table import COLUMNS, Row, table_1

# More equals than these say nothing new.
MOST_SHOWN = 8


def print_report(optimum: Optimum, console: Console, chosen: Placement | None) -> None:
    """Graph, findings and tables; `chosen` is a placement the user asks about."""
    console.print(f"{described(optimum.assumptions)}; M: number of parameters", highlight=False, soft_wrap=True)
    console.print(_graph_table(optimum))
    if optimum.assumptions == PAPER:
        rows = table_1()
        console.print(_table_1(rows))
        for line in misprints(rows):
            console.print(line, highlight=False, soft_wrap=True)
    else:
        console.print(_placements_table("least traffic", optimum.least_traffic, optimum))
    console.print(_placements_table("fewest bytes on the GPU for the bytes over the link", optimum.frontier, optimum))
    for line in findings(optimum):
        console.print(line, highlight=False, soft_wrap=True)
    if chosen is not None:
        console.print(_placements_table("as asked", (chosen,), optimum))


def described(assumptions: Assumptions) -> str:
    states = f", {assumptions.states} states" if assumptions.optimizer != "sgd" else ""
    master = "fp32 master parameters" if assumptions.master == "fp32" else "no master parameters"
    split = "" if assumptions.split is None else f", {float(assumptions.split):.7g} of the parameters on their own"
    return f"{assumptions.optimizer}{states}, {master}, {assumptions.gradients} gradients{split}"


def misprints(rows: Sequence[Row]) -> list[str]:
    return [
        f"Misprint: the paper prints {row.printed_gpu_bytes_per_param}M bytes where {listed(_cpu_side(row))} "
        f"{'are' if len(_cpu_side(row)) > 1 else 'is'} on the CPU. What is left on the GPU is "
        f"{in_m(row.gpu_bytes_per_param)}, which is also what its own reduction of {row.printed_reduction} says."
        for row in rows
        if row.misprinted
    ]


def findings(optimum: Optimum) -> list[str]:
    all_, best = optimum.placements, optimum.best
    least, before = best[0].link_bytes_per_param, optimum.everything_on_gpu.gpu_bytes_per_param
    alone = f"{_side(optimum, best[0])} on the CPU, and no other" if len(best) == 1 else f"{len(best)} of them alike"
    ours, l2l = optimum.offload, optimum.layer_to_layer
    ratio = times(l2l.link_bytes_per_param / ours.link_bytes_per_param)
    lines = [
        f"{len(all_):,} placements ({len(optimum.fused_placements)} of super nodes); {int(all_.in_scope.sum()):,} have "
        "compute below O(MB) on the CPU and leave activations where they are used.",
        f"Least traffic: {in_m(least)} bytes an iteration, reached by {len(optimum.least_traffic)}.",
        f"Largest saving with it: {in_m(before)} -> {in_m(best[0].gpu_bytes_per_param)}, by {alone}.",
        _divided(optimum, least),
        f"ZeRO-Offload ({_side(optimum, ours)} on the CPU) moves {in_m(ours.link_bytes_per_param)} and keeps "
        f"{in_m(ours.gpu_bytes_per_param)} on the GPU. {_rivals(optimum)}",
        f"L2L ({_side(optimum, l2l)} on the CPU, updates on the GPU) moves {in_m(l2l.link_bytes_per_param)}, {ratio} "
        "as much.",
    ]
    return [line for line in lines if line]


def _divided(optimum: Optimum, least: Fraction) -> str:
    divided = optimum.divided_update_link_bytes_per_param
    moved = optimum.parameters_on_cpu_link_bytes_per_param
    parameters = f"16-bit parameters on the CPU cost at least {in_m(moved)}." if moved is not None else ""
    if divided is None:
        return parameters
    verdict = "so they can be fused" if divided > least else "so fusing them loses a placement with the least traffic"
    return f"An update apart from one of its states or its cast costs at least {in_m(divided)}, {verdict}; {parameters}"


def _rivals(optimum: Optimum) -> str:
    wins = optimum.best == (optimum.offload,)
    opening = "" if wins else "By traffic another placement wins. "
    if not optimum.rivals:
        return opening + "No other is as good in all of CPU compute, traffic and GPU memory."
    best = min(optimum.rivals, key=lambda each: (each.gpu_bytes_per_param, each.link_bytes_per_param))
    return (
        f"{opening}As good or better in all of CPU compute, traffic and GPU memory: {len(optimum.rivals)}, such as "
        f"{_side(optimum, best)} on the CPU ({in_m(best.link_bytes_per_param)}, {in_m(best.gpu_bytes_per_param)})."
    )


def _side(optimum: Optimum, placement: Placement) -> str:
    return listed(optimum.by_super_node(placement.on_cpu))


def _cpu_side(row: Row) -> tuple[str, ...]:
    return tuple(name for name, place in zip(COLUMNS, row.places, strict=True) if place == "cpu")


def _graph_table(optimum: Optimum) -> Table:
    fused = (f"{name}: {listed(members)}" for name, members in optimum.fused_graph.nodes(data="members"))
    caption = "super nodes: " + "; ".join(text for text in fused if " and " in text)
    table = Table(title="data-flow graph, bytes per iteration", title_justify="left", caption=caption)
    table.caption_justify = "left"
    for column in ("node", "compute", "held", "goes to"):
        table.add_column(column, justify="right" if column == "held" else "left")
    for name, each in optimum.graph.nodes(data=True):
        flows = (
            f"{target} {'(batch)' if flow['activations'] else in_m(flow['bytes_per_param'])}"
            for _, target, flow in optimum.graph.out_edges(name, data=True)
        )
        held = in_m(each["bytes_per_param"]) if each["bytes_per_param"] else ""
        table.add_row(name, each["compute"].label if each["compute"] else "", held, ", ".join(flows))
    return table


def _table_1(rows: Sequence[Row]) -> Table:
    table = Table(title="Table 1: placements of the super nodes with the least traffic", title_justify="left")
    for column in (*COLUMNS, "over the link", "GPU memory", "reduction"):
        table.add_column(column)
    for row in rows:
        memory = in_m(row.gpu_bytes_per_param)
        if row.misprinted:
            memory += f" (printed: {row.printed_gpu_bytes_per_param}M)"
        table.add_row(*row.places, in_m(row.link_bytes_per_param), memory, times(row.reduction))
    return table


def _placements_table(title: str, placements: Sequence[Placement], optimum: Optimum) -> Table:
    before = optimum.everything_on_gpu.gpu_bytes_per_param
    left_out = len(placements) - MOST_SHOWN
    caption = f"and {left_out} more" if left_out > 0 else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("on the CPU")
    table.add_column("CPU compute")
    for column in ("link", "GPU", "CPU", "reduction"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in placements[:MOST_SHOWN]:
        gpu, link = each.gpu_bytes_per_param, in_m(each.link_bytes_per_param)
        table.add_row(
            _side(optimum, each),
            each.cpu_compute.label,
            f"{link} + activations" if each.cuts_activations else link,
            in_m(gpu),
            in_m(each.cpu_bytes_per_param),
            times(before / gpu) if gpu else "all",
        )
    return table
