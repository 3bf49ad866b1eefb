"""What the enumeration shows, as plain data for programs."""

from dataclasses import asdict
from fractions import Fraction
from typing import Any

from zofftk.dataflow.assumptions import PAPER
from zofftk.dataflow.formats import as_number
from zofftk.dataflow.optimum import Optimum
from zofftk.dataflow.placements import Placement
from zofftk.dataflow.table import COLUMNS, Row, table_1


def record(optimum: Optimum, chosen: Placement | None = None, *, all_placements: bool = False) -> dict[str, Any]:
    """All results under one set of assumptions; bytes are per parameter, over the link per iteration.

    `table_1` is there under the paper's assumptions only, `as_asked` where a placement is `chosen`. `all_placements`
    adds every placement of both graphs, with and without super nodes.
    """
    rows = [row_record(row) for row in table_1()] if optimum.assumptions == PAPER else None
    result: dict[str, Any] = {
        "assumptions": {
            name: as_number(value) if isinstance(value, Fraction) else value
            for name, value in asdict(optimum.assumptions).items()
        },
        "graph": graph_record(optimum),
        "number_of_placements": len(optimum.placements),
        "number_in_scope": int(optimum.placements.in_scope.sum()),
        "number_of_super_node_placements": len(optimum.fused_placements),
        "super_nodes_keep_the_least": optimum.super_nodes_keep_the_least,
        "least_traffic": [placement_record(each) for each in optimum.least_traffic],
        "best": [placement_record(each) for each in optimum.best],
        "divided_update_link_bytes_per_param": _or_none(optimum.divided_update_link_bytes_per_param),
        "parameters_on_cpu_link_bytes_per_param": _or_none(optimum.parameters_on_cpu_link_bytes_per_param),
        "zero_offload": placement_record(optimum.offload),
        "rivals_of_zero_offload": [placement_record(each) for each in optimum.rivals],
        "layer_to_layer": placement_record(optimum.layer_to_layer),
        "frontier": [placement_record(each) for each in optimum.frontier],
        "as_asked": None if chosen is None else placement_record(chosen),
        "table_1": rows,
    }
    if all_placements:
        result["placements"] = [placement_record(each) for each in optimum.placements]
        result["super_node_placements"] = [placement_record(each) for each in optimum.fused_placements]
    return result


def graph_record(optimum: Optimum) -> dict[str, Any]:
    nodes = [
        {
            "name": name,
            "role": each["role"],
            "super_node": each["super_node"],
            "compute": each["compute"].label,
            "bytes_per_param": as_number(each["bytes_per_param"]),
        }
        for name, each in optimum.graph.nodes(data=True)
    ]
    edges = [
        {
            "source": source,
            "target": target,
            # The batch, not the parameters, decides what activations take.
            "bytes_per_param": None if flow["activations"] else as_number(flow["bytes_per_param"]),
        }
        for source, target, flow in optimum.graph.edges(data=True)
    ]
    return {"nodes": nodes, "edges": edges}


def placement_record(placement: Placement) -> dict[str, Any]:
    return {
        "on_cpu": list(placement.on_cpu),
        "cpu_compute": placement.cpu_compute.label,
        "link_bytes_per_param": as_number(placement.link_bytes_per_param),
        "gpu_bytes_per_param": as_number(placement.gpu_bytes_per_param),
        "cpu_bytes_per_param": as_number(placement.cpu_bytes_per_param),
        "cuts_activations": placement.cuts_activations,
    }


def row_record(row: Row) -> dict[str, Any]:
    return {
        "places": dict(zip(COLUMNS, row.places, strict=True)),
        "link_bytes_per_param": as_number(row.link_bytes_per_param),
        "gpu_bytes_per_param": as_number(row.gpu_bytes_per_param),
        "reduction": as_number(row.reduction),
        "printed_gpu_bytes_per_param": row.printed_gpu_bytes_per_param,
        "printed_reduction": row.printed_reduction,
        "misprinted": row.misprinted,
    }


def _or_none(value: Fraction | None) -> int | float | None:
    return None if value is None else as_number(value)
