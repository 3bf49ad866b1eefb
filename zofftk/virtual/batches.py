"""A recording of any micro-batch, from those of two others.

Of an operation on a batch, what it reads, writes and computes is a part that the batch does not change (weights) and
one that is proportional to it. So two recordings say what any other would have.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from zofftk.virtual.cost_tape import Cost, CostTape
from zofftk.virtual.events import Event, Parts, Spent, Taken

RECORDED = 2, 3  # micro-batches; with 1, operations may take another way


def extrapolate(
    recorded: tuple[tuple[Parts, CostTape], tuple[Parts, CostTape]], micro_batch: int
) -> tuple[Parts, CostTape]:
    """Raises ValueError where the two did not do the same."""
    (few, tape), (more, longer) = recorded
    parts = {part: [_event(a, b, micro_batch) for a, b in zip(few[part], more[part], strict=True)] for part in few}
    kept = sum(event.ns for events in few.values() for event in events if isinstance(event, Spent))
    costs = [_cost(a, b, micro_batch) for a, b in zip(tape.costs[:kept], longer.costs[:kept], strict=True)]
    return parts, replace(tape, costs=costs)


def _event(a: Event, b: Event, micro_batch: int) -> Event:
    if isinstance(a, Spent) and isinstance(b, Spent) and (a.phase, a.ns) == (b.phase, b.ns):
        return replace(a, flops=_at(a.flops, b.flops, micro_batch))
    if isinstance(a, Taken) and isinstance(b, Taken) and a.block == b.block:
        return replace(a, nbytes=_at(a.nbytes, b.nbytes, micro_batch))
    if a != b:
        raise ValueError(f"micro-batches of {RECORDED} differ: {a} and {b}")
    return a


def _cost(a: Cost, b: Cost, micro_batch: int) -> Cost:
    numbers: dict[str, Any] = {
        name.name: _at(getattr(a, name.name), getattr(b, name.name), micro_batch) for name in fields(Cost)
    }
    return Cost(**numbers | {"wide": a.wide, "is_attention": a.is_attention})


def _at(a: int, b: int, micro_batch: int) -> int:
    return a + (b - a) * (micro_batch - RECORDED[0])
