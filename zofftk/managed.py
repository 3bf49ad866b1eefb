"""What the engine knows of one parameter, and of a bucket between its update and its arrival."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from zofftk.device.base import Event
from zofftk.host_state import HostBucket, HostSegment
from zofftk.staging import Slot


class Gathered(Enum):
    """What the engine holds of a parameter's gradient."""

    NOTHING = "nothing"
    LIVE = "live"  # for the coming update
    SPENT = "spent"  # used by the last one


@dataclass(eq=False)
class Managed:
    """One parameter in the engine's care."""

    index: int
    tensor: torch.Tensor
    name: str
    segment: HostSegment
    buckets: list[HostBucket]
    gathered: Gathered = Gathered.NOTHING
    round: int = -1  # the round its last gradient came in
    step: int = 0  # updates it has had
    square_sum: float = 0.0  # of the gradient the last norm was taken of, unscaled
    version: int = field(init=False)  # of the tensor, after our last write

    def __post_init__(self) -> None:
        self.version = self.tensor._version


@dataclass(frozen=True)
class Update:
    """A bucket whose update is under way on the host."""

    bucket: HostBucket
    present: set[int]  # the parameters that take part
    written: Event  # the new values are on the wire


@dataclass(frozen=True)
class Arrival:
    """New values on their way into a staging slot."""

    update: Update
    slot: Slot
    landed: Event
