"""Every way to put the nodes of a graph on GPU and CPU, and what each way costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zofftk.dataflow.graph import Compute
from zofftk.errors import InputError

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Placement:
    """A two-way cut: data nodes live, and compute nodes run, on their side. Bytes are per parameter."""

    on_cpu: tuple[str, ...]  # in the order of the graph; all others are on the GPU
    cpu_compute: Compute  # the most costly computation on the CPU
    link_bytes_per_param: Fraction  # over the link in one iteration, both directions together
    gpu_bytes_per_param: Fraction
    cpu_bytes_per_param: Fraction
    cuts_activations: bool  # which then cross the link too, uncounted: they grow with the batch


class Placements:
    """All 2**n placements of a graph of n nodes.

    Arrays have one entry a placement: bit i of the entry's index says that node i is on the CPU. Bytes are exact:
    integers in units of 1/`scale` byte per parameter.
    """

    def __init__(self, graph: nx.DiGraph) -> None:
        self.nodes: tuple[str, ...] = tuple(graph)
        held = [graph.nodes[name]["bytes_per_param"] for name in self.nodes]
        flows = [(u, v, flow["bytes_per_param"], flow["activations"]) for u, v, flow in graph.edges(data=True)]
        self.scale = lcm(*(each.denominator for each in (*held, *(flow[2] for flow in flows))))
        index = np.arange(2 ** len(self.nodes))
        on_cpu = {name: (index >> i & 1).astype(bool) for i, name in enumerate(self.nodes)}
        self.link = np.zeros_like(index)
        self.cpu = np.zeros_like(index)
        self.cpu_compute = np.zeros_like(index)
        self.cuts_activations = np.zeros(index.shape, bool)
        for name, each in zip(self.nodes, held, strict=True):
            self.cpu += on_cpu[name] * int(each * self.scale)
            np.maximum(self.cpu_compute, on_cpu[name] * int(graph.nodes[name]["compute"]), out=self.cpu_compute)
        for source, target, each, activations in flows:
            cut = on_cpu[source] ^ on_cpu[target]
            self.link += cut * int(each * self.scale)
            if activations:
                self.cuts_activations |= cut
        self.gpu = int(sum(held, Fraction(0)) * self.scale) - self.cpu

    def __len__(self) -> int:
        return len(self.link)

    def __iter__(self) -> Iterator[Placement]:
        return (self[index] for index in range(len(self)))

    @property
    def nontrivial(self) -> NDArray[np.bool_]:
        """Something on either side."""
        index = np.arange(len(self))
        return (index > 0) & (index < len(self) - 1)

    @property
    def in_scope(self) -> NDArray[np.bool_]:
        """What the paper considers: work below O(MB) on the CPU, and activations that stay where they are used."""
        return (self.cpu_compute <= Compute.M) & ~self.cuts_activations

    def on_cpu(self, name: str) -> NDArray[np.bool_]:
        return (np.arange(len(self)) >> self.nodes.index(name) & 1).astype(bool)

    def select(self, chosen: NDArray[np.bool_]) -> tuple[Placement, ...]:
        """The placements where `chosen` is true, in the order of their indices."""
        return tuple(self[int(i)] for i in np.flatnonzero(chosen))

    def find(self, on_cpu: Iterable[str]) -> Placement:
        """The placement with exactly these nodes on the CPU; raises InputError for a node that is not in the graph."""
        names = set(on_cpu)
        for name in sorted(names - set(self.nodes)):
            raise InputError(f"expected nodes out of {', '.join(self.nodes)}, got {name}")
        return self[sum(1 << i for i, name in enumerate(self.nodes) if name in names)]

    def __getitem__(self, index: int) -> Placement:
        if not 0 <= index < len(self):
            raise IndexError(f"expected an index from 0 to {len(self) - 1}, got {index}")
        return Placement(
            on_cpu=tuple(name for i, name in enumerate(self.nodes) if index >> i & 1),
            cpu_compute=Compute(int(self.cpu_compute[index])),
            link_bytes_per_param=Fraction(int(self.link[index]), self.scale),
            gpu_bytes_per_param=Fraction(int(self.gpu[index]), self.scale),
            cpu_bytes_per_param=Fraction(int(self.cpu[index]), self.scale),
            cuts_activations=bool(self.cuts_activations[index]),
        )
