"""What the engine knows of one parameter, and of a bucket between its update and its arrival."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from zofftk.device.base import Buffer, Event
from zofftk.host_state import HostBucket, HostSegment
from zofftk.ranks.slices import local_of, placed, to_slice
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
    elsewhere: bool = False  # only other ranks have a gradient for the coming update
    round: int = -1  # of the ranks, the one its last gradient leaves in
    dropped: int = 0  # rounds that may hold a gradient of it which was dropped since all ranks did that together
    step: int = 0  # updates it has had
    filled: set[str] = field(default_factory=set)  # moments that hold something
    square_sum: float = 0.0  # of the gradient the last norm was taken of, unscaled
    wire: torch.dtype = torch.float32  # its gradients' on the link
    comes_again: bool = False  # more than one gradient has come since the last step
    comes_once: bool | None = None  # in every step so far, in a backward of one part; None: no step so far
    is_copy: bool = False  # ranks with other slices have all of it too, and one of them presents it
    is_loaded: bool = False  # the master is a loaded one, which the weight in the model is still to be held against
    version: int = field(init=False)  # of the tensor, after our last write or look
    place: tuple[int, torch.dtype] = field(init=False)  # its memory and dtype then
    shape: torch.Size = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.device = self.tensor.shape, self.tensor.device
        self.placed = placed(self.tensor)
        self.note()

    @property
    def local(self) -> torch.Tensor:
        """What is in this rank's memory: the parameter itself, or a DTensor's slice."""
        return local_of(self.tensor)

    @property
    def is_live(self) -> bool:
        """There is a gradient for the coming update, here or on another rank."""
        return self.gathered is Gathered.LIVE or self.elsewhere

    def to_slice(self, grad: torch.Tensor) -> torch.Tensor:
        """Of a gradient of the parameter, that of what is in this rank's memory."""
        return to_slice(self.tensor, grad, self.name)

    @property
    def gathered_square_sum(self) -> float:
        """Of the gathered gradient as it stands now: zeroed or scaled since its statistics were taken."""
        bucket = self.buckets[0]
        return 0.0 if self.index in bucket.zero else self.square_sum * bucket.scale.get(self.index, 1.0) ** 2

    def scale_gathered(self, factor: float) -> None:
        """Of the gathered gradient, what is there: true zeros stay."""
        for bucket in self.buckets:
            if self.index not in bucket.zero:
                bucket.scale[self.index] = bucket.scale.get(self.index, 1.0) * factor

    def note(self) -> None:
        """The tensor is as the host's states say."""
        self.is_loaded = False
        self.version = self.tensor._version
        self.place = self._place()

    @property
    def is_edited(self) -> bool:
        """Somebody has written into the tensor, or given it other memory or another dtype."""
        return self.tensor._version != self.version or self.place != self._place()

    def _place(self) -> tuple[int, torch.dtype]:
        return self.local.untyped_storage()._cdata, self.tensor.dtype

    def complaint(self, tensor: torch.Tensor) -> str | None:
        """Why the engine cannot go on with `tensor`, which the parameter has become."""
        built = "when the optimizer was built: build the optimizer after the change"
        if tensor.shape != self.shape:
            return f"{self.name} has shape {tuple(tensor.shape)}, it had {tuple(self.shape)} {built}"
        if placed(tensor) != self.placed:
            return f"{self.name} is placed as {placed(tensor)}, it was as {self.placed} {built}"
        if tensor.device != self.device:
            return f"{self.name} is on {tensor.device}, it was on {self.device} {built}"
        if tensor.dtype != self.place[1] and torch.promote_types(tensor.dtype, self.wire) != self.wire:
            return (
                f"{self.name} is {tensor.dtype}, which does not fit into the {self.wire} its gradients and values "
                f"travel in since it was {self.place[1]} {built}"
            )
        return None

    def check(self, tensor: torch.Tensor) -> None:
        if (complaint := self.complaint(tensor)) is not None:
            raise RuntimeError(complaint)


@dataclass(frozen=True)
class Update:
    """A bucket whose update is under way on the host."""

    bucket: HostBucket
    present: set[int]  # the parameters that take part
    wire: Buffer
    written: Event  # the new values are on it


@dataclass(frozen=True)
class Arrival:
    """New values on their way into a staging slot."""

    update: Update
    slot: Slot
    landed: Event
