"""A recording that knows no machine: what each operation costs, so that it can be timed on any profile afterwards.

Recording runs the model's Python; timing is arithmetic. Whoever tries many profiles records once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from zofftk.virtual.durations import Durations
from zofftk.virtual.events import Parts, Spent


@dataclass(frozen=True)
class Cost:
    """Of one operation; `exchanged` is round the slices of a layer, and then there is nothing else."""

    flops: int = 0
    elements: int = 0
    nbytes: int = 0
    wide: bool = False
    is_attention: bool = False
    exchanged: int = 0

    def ns(self, on: Durations) -> int:
        if self.exchanged:
            return on.slices_ns(self.exchanged)
        if self.flops:
            return on.compute_ns(self.flops, self.elements, self.nbytes, wide=self.wide, is_attention=self.is_attention)
        return on.move_ns(self.nbytes)


@dataclass(frozen=True)
class CostTape(Durations):
    """Stands in for a machine while a model is recorded: every operation takes 1, and goes onto the tape."""

    costs: list[Cost] = field(default_factory=list, compare=False)

    def compute_ns(self, flops: int, elements: int, nbytes: int, *, wide: bool, is_attention: bool = False) -> int:
        return self._keep(Cost(flops, elements, nbytes, wide, is_attention))

    def move_ns(self, nbytes: int) -> int:
        return self._keep(Cost(nbytes=nbytes))

    def slices_ns(self, nbytes: int) -> int:
        return self._keep(Cost(exchanged=nbytes))

    def _keep(self, cost: Cost) -> int:
        self.costs.append(cost)
        return 1

    def timed(self, parts: Parts, on: Durations) -> Parts:
        """`parts`, which the tape's first operations have made, with the times of another machine."""
        costs = iter(self.costs)
        return {
            part: [_timed(event, costs, on) if isinstance(event, Spent) else event for event in events]
            for part, events in parts.items()
        }


def _timed(spent: Spent, costs: Iterator[Cost], on: Durations) -> Spent:
    return replace(spent, ns=sum(next(costs).ns(on) for _ in range(spent.ns)))
