"""What has been spent so far, and what of it went into one step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counts:
    """Time, operations and traffic, of one rank."""

    ns: int
    flops: int  # recomputation included
    bytes_down: int
    bytes_up: int
    bytes_between: int  # devices; each way
    busy_ns: Counter[str] = field(default_factory=Counter)  # by stream

    def since(self, before: Counts) -> Counts:
        return self.plus(before, -1)

    def plus(self, other: Counts, times: int) -> Counts:
        """This, and `other` so many times."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "busy_ns"]
        sums = {name: getattr(self, name) + times * getattr(other, name) for name in names}
        streams = self.busy_ns.keys() | other.busy_ns.keys()
        busy = Counter({stream: self.busy_ns[stream] + times * other.busy_ns[stream] for stream in streams})
        return Counts(**sums, busy_ns=busy)
