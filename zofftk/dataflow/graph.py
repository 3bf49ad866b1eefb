"""The data-flow graph of one training iteration: what is stored, what is computed, what flows between."""

from __future__ import annotations

from enum import IntEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from zofftk.dataflow.assumptions import OPTIMIZERS, WIDTH_BYTES, Assumptions

if TYPE_CHECKING:
    import networkx as nx

PARAMETER_BYTES = 2
MASTER_BYTES = 4
FWD, BWD, ACTIVATIONS = "FWD", "BWD", "activation16"
FWD_BWD, UPDATE = "FWD-BWD", "Update"


class Compute(IntEnum):
    """Operations of a node in one iteration, for M parameters and an effective batch of B."""

    NONE = 0
    M = 1
    MB = 2

    @property
    def label(self) -> str:
        return ("none", "O(M)", "O(MB)")[self]


def build_graph(assumptions: Assumptions) -> nx.DiGraph:
    """The graph of the paper's section 3 (Figure 2), one node for each tensor and each computation.

    Node attributes: `role` (the same under all assumptions and in all parts), `bytes_per_param` (held between
    iterations, over all parameters; 0 for a computation), `compute`, and `super_node`, the name of the node it belongs
    to in the fused graph. Edge attributes: `bytes_per_param`, what flows in one iteration, and `activations`: such an
    edge grows with the batch, not with the parameters, and has no bytes here.

    A state is one node, read and written in each iteration, so that every node lies on a cycle.
    """
    import networkx as nx

    graph = nx.DiGraph()
    _add_compute(graph, FWD, "forward", Compute.MB, FWD_BWD)
    _add_data(graph, ACTIVATIONS, "activations", Fraction(0), FWD_BWD)
    _add_compute(graph, BWD, "backward", Compute.MB, FWD_BWD)
    for source, target in ((FWD, ACTIVATIONS), (ACTIVATIONS, BWD)):
        graph.add_edge(source, target, bytes_per_param=Fraction(0), activations=True)
    for ending, share in assumptions.parts():
        _add_part(graph, assumptions, ending, share)
    return graph


def _add_part(graph: nx.DiGraph, assumptions: Assumptions, ending: str, share: Fraction) -> None:
    """The nodes that belong to `share` of the parameters, element by element."""
    gradient_bytes, state_bytes = WIDTH_BYTES[assumptions.gradients], WIDTH_BYTES[assumptions.states]
    p16, g, update = f"p16{ending}", f"g{8 * gradient_bytes}{ending}", f"update{ending}"
    fused_update = f"{UPDATE}{ending}"

    def flow(source: str, target: str, width_bytes: int) -> None:
        graph.add_edge(source, target, bytes_per_param=share * width_bytes, activations=False)

    _add_data(graph, p16, "parameter", share * PARAMETER_BYTES, p16)
    _add_data(graph, g, "gradient", share * gradient_bytes, g)
    _add_compute(graph, update, "update", Compute.M, fused_update)
    flow(p16, FWD, PARAMETER_BYTES)
    flow(p16, BWD, PARAMETER_BYTES)
    flow(BWD, g, gradient_bytes)
    flow(g, update, gradient_bytes)
    states = [(letter, state_bytes) for letter in OPTIMIZERS[assumptions.optimizer]]
    if assumptions.master == "fp32":
        states = [("p", MASTER_BYTES), *states]
    for letter, width_bytes in states:
        role = {"p": "master", "m": "momentum", "v": "variance"}[letter]
        state = f"{letter}{8 * width_bytes}{ending}"
        _add_data(graph, state, role, share * width_bytes, fused_update)
        flow(state, update, width_bytes)
        flow(update, state, width_bytes)
    if assumptions.master == "fp32":
        cast, master = f"float2half{ending}", f"p{8 * MASTER_BYTES}{ending}"
        _add_compute(graph, cast, "cast", Compute.M, fused_update)
        flow(master, cast, MASTER_BYTES)
        flow(cast, p16, PARAMETER_BYTES)
    else:
        flow(p16, update, PARAMETER_BYTES)
        flow(update, p16, PARAMETER_BYTES)


def _add_data(graph: nx.DiGraph, name: str, role: str, bytes_per_param: Fraction, super_node: str) -> None:
    graph.add_node(name, role=role, bytes_per_param=bytes_per_param, compute=Compute.NONE, super_node=super_node)


def _add_compute(graph: nx.DiGraph, name: str, role: str, compute: Compute, super_node: str) -> None:
    graph.add_node(name, role=role, bytes_per_param=Fraction(0), compute=compute, super_node=super_node)


def fuse(graph: nx.DiGraph) -> nx.DiGraph:
    """The graph of super nodes: forward with backward, and each part's update with its states and its cast.

    Its nodes have the bytes of their `members` together, and the most costly of their computations; edges inside a
    super node are gone, those between two are added up. `role` is `None` where a node has several members.
    """
    import networkx as nx

    home: dict[str, str] = dict(graph.nodes(data="super_node"))
    members: dict[str, list[str]] = {}
    for name, super_node in home.items():
        members.setdefault(super_node, []).append(name)
    fused = nx.DiGraph()
    for super_node, names in members.items():
        attributes: list[dict[str, Any]] = [graph.nodes[name] for name in names]
        fused.add_node(
            super_node,
            role=attributes[0]["role"] if len(names) == 1 else None,
            bytes_per_param=sum((each["bytes_per_param"] for each in attributes), Fraction(0)),
            compute=max(each["compute"] for each in attributes),
            super_node=super_node,
            members=tuple(names),
        )
    for source, target, flow in graph.edges(data=True):
        ends = home[source], home[target]
        if ends[0] == ends[1]:
            continue
        before = fused.edges[ends]["bytes_per_param"] if fused.has_edge(*ends) else Fraction(0)
        fused.add_edge(*ends, bytes_per_param=before + flow["bytes_per_param"], activations=flow["activations"])
    return fused
