"""Which placements are best: the argument of the paper's section 3, by looking at all of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from zofftk.dataflow.assumptions import Assumptions
from zofftk.dataflow.graph import FWD_BWD, build_graph, fuse
from zofftk.dataflow.placements import Placement, Placements

STATE_ROLES = ("master", "momentum", "variance")


@dataclass(frozen=True)
class Optimum:
    """What the enumeration shows under `assumptions`; each property is computed when it is first asked for.

    Unless said otherwise, placements are of the graph without super nodes, and in scope: computations of O(MB) stay on
    the GPU, and so do the activations between them.
    """

    assumptions: Assumptions

    @cached_property
    def graph(self) -> nx.DiGraph:
        return build_graph(self.assumptions)

    @cached_property
    def fused_graph(self) -> nx.DiGraph:
        return fuse(self.graph)

    @cached_property
    def placements(self) -> Placements:
        return Placements(self.graph)

    @cached_property
    def fused_placements(self) -> Placements:
        return Placements(self.fused_graph)

    def by_super_node(self, on_cpu: Collection[str]) -> tuple[str, ...]:
        """The same nodes, with the name of a super node in the place of all its members."""
        members = dict(self.fused_graph.nodes(data="members"))
        home = dict(self.graph.nodes(data="super_node"))
        names = (home[name] if set(members[home[name]]) <= set(on_cpu) else name for name in on_cpu)
        return tuple(dict.fromkeys(names))

    @cached_property
    def everything_on_gpu(self) -> Placement:
        return self.placements[0]

    @cached_property
    def least_traffic(self) -> tuple[Placement, ...]:
        """All that move the fewest bytes with something on either side."""
        return self.placements.select(_least_traffic(self.placements))

    @cached_property
    def best(self) -> tuple[Placement, ...]:
        """Those of `least_traffic` that leave the fewest bytes on the GPU: one under the paper's assumptions."""
        fewest = min(each.gpu_bytes_per_param for each in self.least_traffic)
        return tuple(each for each in self.least_traffic if each.gpu_bytes_per_param == fewest)

    @cached_property
    def offload(self) -> Placement:
        """ZeRO-Offload's: gradients, states, update and cast on the CPU."""
        kept = ("forward", "backward", "activations", "parameter")
        return self.placements.find(name for name, role in self.graph.nodes(data="role") if role not in kept)

    @cached_property
    def rivals(self) -> tuple[Placement, ...]:
        """Others that are no worse than `offload` in CPU compute, link bytes and GPU bytes.

        Without any, `offload` is optimal and the only one: whatever saves as much costs more. No placement in scope has
        more CPU compute than its O(M).
        """
        all_, ours = self.placements, self.placements.find(self.offload.on_cpu)
        no_worse = (
            all_.in_scope
            & (all_.link <= int(ours.link_bytes_per_param * all_.scale))
            & (all_.gpu <= int(ours.gpu_bytes_per_param * all_.scale))
        )
        return tuple(each for each in all_.select(no_worse) if each != ours)

    @cached_property
    def frontier(self) -> tuple[Placement, ...]:
        """From everything on the GPU to the fewest bytes there: what more link bytes buy. Equals stand together."""
        all_ = self.placements
        chosen = np.zeros(len(all_), bool)
        fewest = None
        for link in np.unique(all_.link[all_.in_scope]):
            here = all_.in_scope & (all_.link == link)
            gpu = all_.gpu[here].min()
            if fewest is None or gpu < fewest:
                fewest = gpu
                chosen |= here & (all_.gpu == gpu)
        return tuple(sorted(all_.select(chosen), key=lambda each: each.link_bytes_per_param))

    @cached_property
    def layer_to_layer(self) -> Placement:
        """L2L's: parameters and states live on the CPU and every layer's are brought to the GPU, which also updates.

        The paper gives L2L's total, 28 bytes per parameter, without its parts. This is the cheapest placement that
        keeps parameters and states on the CPU and forward, backward and update on the GPU. The gradients it counts on
        the GPU are those of one layer at a time there.
        """
        all_ = self.placements
        fits = all_.in_scope
        for name, role in self.graph.nodes(data="role"):
            if role in ("parameter", *STATE_ROLES):
                fits &= all_.on_cpu(name)
            elif role in ("forward", "backward", "update"):
                fits &= ~all_.on_cpu(name)
        return all_.select(fits & (all_.link == all_.link[fits].min()))[0]

    @cached_property
    def divided_update_link_bytes_per_param(self) -> Fraction | None:
        """Fewest link bytes where an update is on another side than one of its states or its cast; None: it has none.

        As long as this is above the least traffic, all these can be fused into one super node.
        """
        all_ = self.placements
        divided = np.zeros(len(all_), bool)
        for super_node, members in self.fused_graph.nodes(data="members"):
            if super_node != FWD_BWD:
                sides = np.stack([all_.on_cpu(name) for name in members])
                divided |= sides.any(axis=0) & ~sides.all(axis=0)
        return _fewest_link_bytes(all_, all_.in_scope & divided)

    @cached_property
    def parameters_on_cpu_link_bytes_per_param(self) -> Fraction | None:
        """Fewest link bytes where 16-bit parameters are on the CPU, away from forward and backward."""
        all_ = self.placements
        names = [name for name, role in self.graph.nodes(data="role") if role == "parameter"]
        away = np.stack([all_.on_cpu(name) for name in names]).any(axis=0)
        return _fewest_link_bytes(all_, all_.in_scope & away)

    @cached_property
    def super_nodes_keep_the_least(self) -> bool:
        """Whether the fused graph, with its few placements, has every placement of `least_traffic`."""
        fused = self.fused_placements
        members = dict(self.fused_graph.nodes(data="members"))
        whole = {
            frozenset(name for super_node in each.on_cpu for name in members[super_node])
            for each in fused.select(_least_traffic(fused))
        }
        return whole == {frozenset(each.on_cpu) for each in self.least_traffic}


def _fewest_link_bytes(placements: Placements, among: NDArray[np.bool_]) -> Fraction | None:
    return Fraction(int(placements.link[among].min()), placements.scale) if among.any() else None


def _least_traffic(placements: Placements) -> NDArray[np.bool_]:
    considered = placements.in_scope & placements.nontrivial
    return considered & (placements.link == placements.link[considered].min())
