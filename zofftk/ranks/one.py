"""A rank that has all states to itself: buckets leave as soon as they are full, and nobody has to be asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from zofftk import clipping
from zofftk.device.base import COMPUTE, DOWN, HOST, UP, Buffer, Device, Event
from zofftk.errors import RankError
from zofftk.host_state import HostBucket, HostSegment
from zofftk.managed import Managed, Update
from zofftk.ranks.world import has_world
from zofftk.staging import Slot

NORM, STEP, ADD, DROP, FLUSH, SWITCH = 2.0, 3.0, 4.0, 5.0, 6.0, 7.0  # what all ranks have to do alike


class Ranks(Protocol):
    """How gradients come down and values go up, and who has to agree."""

    size: int
    rank: int
    rounds: int  # that have ended; over ranks, they have the same numbers on all of them
    met: int  # of these, when all ranks were at the same point last
    check_norm: Callable[[], None]  # raises where a norm would lack gradients
    members: Sequence[int]  # the ranks by their numbers in the world

    def join(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """These parameters are the same on every rank from now on; raises where the ranks differ in them."""
        ...

    def in_turn(self, bucket: HostBucket) -> Iterable[HostBucket]:
        """A bucket is full: those that may leave now."""
        ...

    def add(self, buckets: Sequence[HostBucket]) -> None:
        """These leave after all others."""
        ...

    def last_of_round(self) -> Iterable[HostBucket]:
        """Those that still have to leave in this round, full or not; after it, another may begin."""
        ...

    def round_of_others(self) -> Iterable[HostBucket]:
        """Those that leave in a round that another rank has begun."""
        ...

    def has_left(self, bucket: HostBucket) -> bool:
        """In this round, and cannot leave again before the next."""
        ...

    def others_go_on(self, does: float, *, knows_norm: bool) -> bool:
        """Another rank has begun a round that this one has no gradients for, and has to take part in before it `does`
        what it is about to do; raises where another rank does something else."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether, when all were asked last, one of them had gradients whose norm was not known."""
        ...

    def update_with(self, hypers: Iterable[object]) -> None:
        """What the coming step updates with, which has to be the same on all ranks."""
        ...

    def packed_as(self, wire: torch.dtype) -> torch.dtype:
        """What gradients are packed as that come down as `wire`."""
        ...

    def fill(self, bucket: HostBucket, data: Buffer) -> set[int]:
        """Make the rest of a slot ready; returns the parameters that come down with it."""
        ...

    def bring_down(self, bucket: HostBucket, slot: Slot, data: Buffer, present: set[int]) -> Event:
        """Bring the packed gradients into the wire, and their statistics; returns when they are there."""
        ...

    def bring_up(self, update: Update, data: Buffer) -> tuple[Event, Event]:
        """Bring new values into a slot; returns when they have left the wire, and when all are in the slot."""
        ...

    def take_norms(self, segments: Sequence[HostSegment], managed: Sequence[Managed], norms: Buffer) -> None:
        """On host: the square sum of every parameter's gradient."""
        ...

    def settle(self, managed: Sequence[Managed], *, at_step: bool) -> None:
        """After `take_norms` has ended: what has been gathered is what any rank has gathered."""
        ...

    def sum_parts(self, flat: torch.Tensor) -> None:
        """Of a gradient of which each rank has filled in its parts: all of it."""
        ...

    def close(self) -> None:
        """Let go of what the ranks share."""
        ...


class OneRank:
    """See the module."""

    size, rank = 1, 0
    has_news = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self.rounds = self.met = 0
        self.check_norm: Callable[[], None] = lambda: None  # one rank has all of them, wherever they are
        self._knew_world = has_world()
        self.members: Sequence[int] = [dist.get_rank() if self._knew_world else 0]
        self._buckets: list[HostBucket] = []

    def join(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        return

    def in_turn(self, bucket: HostBucket) -> Iterable[HostBucket]:
        return (bucket,)

    def add(self, buckets: Sequence[HostBucket]) -> None:
        self._buckets += buckets

    def last_of_round(self) -> Iterable[HostBucket]:
        self.rounds += 1
        return [bucket for bucket in self._buckets if bucket.waiting]

    def round_of_others(self) -> Iterable[HostBucket]:
        return ()

    def has_left(self, bucket: HostBucket) -> bool:
        return False

    def others_go_on(self, does: float, *, knows_norm: bool) -> bool:
        return False

    def update_with(self, hypers: Iterable[object]) -> None:
        if not self._knew_world and has_world() and dist.get_world_size() > 1:
            raise RankError(
                f"torch.distributed has {dist.get_world_size()} ranks now, and had not been initialised when this "
                "optimizer was built, which therefore averages over none of them: build it after init_process_group, "
                "with the process_group of this rank alone if it is to train alone"
            )

    def packed_as(self, wire: torch.dtype) -> torch.dtype:
        return wire

    def fill(self, bucket: HostBucket, data: Buffer) -> set[int]:
        return set(bucket.waiting)

    def bring_down(self, bucket: HostBucket, slot: Slot, data: Buffer, present: set[int]) -> Event:
        device = self._device
        device.wait(DOWN, device.record(COMPUTE), f"packed: {bucket.label} must be complete before it leaves")
        device.copy_down(f"down: {bucket.label}", bucket.wire, data, bucket.runs(present))
        device.copy_down(
            f"down: {bucket.label} statistics", bucket.square_sums, slot.square_sums, bucket.block_runs(present)
        )
        return device.record(DOWN)

    def bring_up(self, update: Update, data: Buffer) -> tuple[Event, Event]:
        label = update.bucket.label
        self._device.wait(UP, update.written, f"updated: {label} must be written before it leaves")
        self._device.copy_up(f"up: {label}", data, update.wire, update.bucket.runs(update.present))
        sent = self._device.record(UP)
        return sent, sent

    def take_norms(self, segments: Sequence[HostSegment], managed: Sequence[Managed], norms: Buffer) -> None:
        device = self._device
        device.wait(HOST, device.record(DOWN), "arrived with statistics: the norm needs those of all buckets")
        sums = [bucket.square_sums for segment in segments for bucket in segment.buckets]
        device.host_task("norm", clipping.sum_blocks(segments, norms), reads=sums, writes=[norms])

    def settle(self, managed: Sequence[Managed], *, at_step: bool) -> None:
        return

    def sum_parts(self, flat: torch.Tensor) -> None:
        return

    def close(self) -> None:
        return
