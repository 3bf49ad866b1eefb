"""Where the time of a step goes: each moment of it to one part, and of each stage what compute hides and what not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zofftk.device.base import COMM, COMPUTE, DOWN, HOST, UP
from zofftk.trace import Span

FORWARD, BACKWARD, UPDATE, SUMS, NOTHING = "forward", "backward", "update", "statistics and sums", "latencies"
_MODEL = (FORWARD, BACKWARD)
_ON_LANE = {DOWN: "gradients down", UP: "values up"}
# Who is named for a moment in which several work: compute before what it waits for, and the update before the link.
_ORDER = (*_MODEL, "pack", "copy back", UPDATE, SUMS, "gradients down", "reduce-scatter", "values up", "all-gather")


@dataclass(frozen=True)
class Stage:
    """How long one kind of work takes in a step: beside forward and backward, and when they stand still."""

    hidden_ns: int
    exposed_ns: int

    @property
    def total_ns(self) -> int:
        return self.hidden_ns + self.exposed_ns


@dataclass(frozen=True)
class StepParts:
    """`parts` of a step in ns, which add up to `step_ns`: while forward and backward stand still, the part is what they
    wait for. `stages` say of each kind of work what is hidden and what is exposed; several may go on at once.
    """

    parts: Mapping[str, int]
    stages: Mapping[str, Stage]
    flops: int  # of one device, recomputed ones included
    bytes_down: int
    bytes_up: int
    bytes_between: int

    @property
    def step_ns(self) -> int:
        return sum(self.parts.values())

    @property
    def step_ms(self) -> float:
        return self.step_ns / 1e6

    @property
    def tflops(self) -> float:
        """1e12 operations a second, of one device."""
        return self.flops / self.step_ns / 1e3

    def continued(self, other: StepParts, numerator: int, denominator: int) -> StepParts:
        """This, and `numerator / denominator` times what `other` has more."""

        def on(own: int, others: int) -> int:
            return own + round((others - own) * numerator / denominator)

        parts = {
            name: on(self.parts.get(name, 0), other.parts.get(name, 0)) for name in _union(self.parts, other.parts)
        }
        none = Stage(0, 0)
        stages = {}
        for name in _union(self.stages, other.stages):
            a, b = self.stages.get(name, none), other.stages.get(name, none)
            stages[name] = Stage(on(a.hidden_ns, b.hidden_ns), on(a.exposed_ns, b.exposed_ns))
        numbers = {
            name: on(getattr(self, name), getattr(other, name))
            for name in ("flops", "bytes_down", "bytes_up", "bytes_between")
        }
        return StepParts(parts, stages, **numbers)


def _union(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return list(dict.fromkeys([*one, *other]))


def stage_of(span: Span, rule: str) -> str | None:
    """None for a wait. `rule` is the name that updates have on the host's stream."""
    kind = span.label.partition(":")[0]
    if span.lane == COMPUTE:
        return {"zero": "pack"}.get(kind, kind) if kind in ("zero", *_ORDER) else None
    if span.lane == HOST:
        return UPDATE if kind == rule else SUMS
    return kind if span.lane == COMM else _ON_LANE.get(span.lane)


def divide(spans: Iterable[Span], start_ns: int, stop_ns: int, rule: str) -> tuple[dict[str, int], dict[str, Stage]]:
    """Parts and stages of what lies between two moments."""
    changes: list[tuple[int, int, str]] = []
    for span in spans:
        stage = stage_of(span, rule)
        start, stop = max(round(span.start_s * 1e9), start_ns), min(round(span.stop_s * 1e9), stop_ns)
        if stage is not None and start < stop:
            changes += [(start, 1, stage), (stop, -1, stage)]
    parts, hidden, exposed, active = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    now = start_ns
    for at, change, stage in sorted(changes):
        _spend(at - now, active, parts, hidden, exposed)
        now = at
        active[stage] += change
        if not active[stage]:
            del active[stage]
    _spend(stop_ns - now, active, parts, hidden, exposed)
    known = [*_ORDER, *sorted((hidden.keys() | exposed.keys() | parts.keys()) - {*_ORDER})]
    stages = {name: Stage(hidden[name], exposed[name]) for name in known if hidden[name] or exposed[name]}
    return {name: parts[name] for name in known if parts[name]}, stages


def _spend(
    duration_ns: int, active: Counter[str], parts: Counter[str], hidden: Counter[str], exposed: Counter[str]
) -> None:
    if duration_ns <= 0:
        return
    named = next((stage for stage in _ORDER if stage in active), next(iter(active), NOTHING))
    parts[named] += duration_ns
    computes = any(stage in active for stage in _MODEL)
    for stage in active:
        (hidden if computes and stage not in _MODEL else exposed)[stage] += duration_ns
