"""One norm for all ranks: each tells the others the square sums of its blocks and which gradients it has.

The blocks are put back into the order of an unsharded run before they are added, so the norm has its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from zofftk import clipping
from zofftk.device.base import COMM, DOWN, HOST, UP, Buffer, Device, Run
from zofftk.host_state import HostSegment
from zofftk.managed import Gathered, Managed
from zofftk.ranks.collectives import all_gather
from zofftk.ranks.group import RankGroup
from zofftk.ranks.virtual_group import VirtualGroup

NOTHING, ZEROS, GRADIENT = 0.0, 1.0, 2.0  # what a rank has of a parameter
DROPPED = 4.0  # added to one of these for each round in which it may have had one that it has dropped


class NormExchange:
    """The buffers of one message a rank, for a fixed list of segments."""

    def __init__(
        self, device: Device, ranks: RankGroup | VirtualGroup, segments: Sequence[HostSegment], num_params: int
    ) -> None:
        self._device, self._ranks = device, ranks
        self._size, self._rank = ranks.size, ranks.rank
        self._num_params = num_params
        self._counts = [max(segment.layout.rank_blocks) for segment in segments]
        self._numel = sum(self._counts) + num_params + 1
        starts = np.concatenate([[0], np.cumsum(self._counts)])
        self._order = [_canonical_order(s, int(at), self._numel) for s, at in zip(segments, starts, strict=False)]
        self._own = device.buffer("own norms", self._numel, torch.float64, "host", zero=True, on_link=True)
        self._all = device.buffer("all norms", self._size * self._numel, torch.float64, "host", on_link=True)
        self._all_dev = device.buffer("all norms on the device", self._size * self._numel, torch.float64, "device")

    def fits(self, segments: Sequence[HostSegment], num_params: int) -> bool:
        return len(segments) == len(self._counts) and num_params == self._num_params

    def run(self, segments: Sequence[HostSegment], managed: Sequence[Managed], norms: Buffer, settings: float) -> None:
        """Enqueue it all; `norms`, `presence` and `settings` are there when the host stream has ended."""
        device = self._device
        sums = [bucket.square_sums for segment in segments for bucket in segment.buckets]
        presence = np.array([presence_of(one) + DROPPED * one.dropped for one in managed] + [settings], np.float64)
        tell = partial(self._tell, segments, presence)
        device.host_task("norm: own blocks", tell, reads=sums, writes=[self._own])
        device.wait(UP, device.record(HOST), "own norms: they must be written before they leave")
        own_dev = self._all_dev.part(self._rank * self._numel, self._numel)
        device.copy_up("up: norms", own_dev, self._own, [Run(0, self._numel)])
        device.wait(COMM, device.record(UP), "norms on the device: they must be there before all have them")
        self._ranks.collective("all-gather: norms", all_gather, self._all_dev, own_dev)
        device.wait(DOWN, device.record(COMM), "gathered norms: those of all ranks must be there")
        device.copy_down("down: norms", self._all, self._all_dev, [Run(0, self._size * self._numel)])
        device.wait(HOST, device.record(DOWN), "arrived norms: the sums need those of all ranks")
        device.host_task("norm", partial(self._add_up, segments, norms), reads=[self._all], writes=[norms])

    def _tell(self, segments: Sequence[HostSegment], presence: np.ndarray) -> None:
        message, at = self._own.tensor.numpy(), 0
        for segment, count in zip(segments, self._counts, strict=True):
            own = segment.square_sums.numpy()
            message[at : at + len(own)] = own
            at += count
        message[at:] = presence

    def _add_up(self, segments: Sequence[HostSegment], norms: Buffer) -> None:
        gathered = self._all.tensor.numpy()
        for segment, order in zip(segments, self._order, strict=True):
            clipping.add_blocks(segment, gathered[order], norms.tensor.numpy())

    def presence(self) -> tuple[np.ndarray, np.ndarray]:
        """What each rank (rows) has of each parameter, and in how many rounds it may have dropped some of it; to be
        asked when the host stream has ended."""
        gathered = self._device.value("presence", self._all).reshape(self._size, self._numel)
        dropped, presence = np.divmod(gathered[:, -1 - self._num_params : -1], DROPPED)
        return presence, dropped

    def settings(self) -> np.ndarray:
        """What each rank says it updates with, as a number."""
        return self._device.value("settings", self._all).reshape(self._size, self._numel)[:, -1]


def presence_of(managed: Managed) -> float:
    """What this rank has of a parameter."""
    if managed.gathered is not Gathered.LIVE:
        return NOTHING
    return ZEROS if any(managed.index in bucket.zero for bucket in managed.buckets) else GRADIENT


def _canonical_order(segment: HostSegment, at: int, message_numel: int) -> np.ndarray:
    """Where in the messages of all ranks each block of the segment is, in the order of the line; `at` in a message."""
    places = [np.empty(0, np.int64)]
    for bucket in segment.layout.buckets:
        for rank, shard in enumerate(bucket.shards):
            first = rank * message_numel + at + shard.first_block
            places.append(np.arange(first, first + shard.num_blocks))
    return np.concatenate(places)
