"""Many ranks that share one model's states (ZeRO-2): each updates its shard of every bucket.

A bucket goes through the ranks on its way down (reduce-scatter) and on its way up (all-gather), on the stream of
collectives, which works on a process group of its own. All ranks enqueue the same collectives in the same order,
whatever order their gradients come in: within a round, buckets leave one after the other, each once, those without
gradients as zeros. Ranks may differ in how many rounds they need (a micro-batch that another rank has no use for), so
each round begins with a word to the others, and so does a step: who hears, at its step, that another has begun a
round takes part in it.

Source: ZeRO-Offload, section 4.2; ZeRO, stage 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from zofftk import update as host_tasks
from zofftk.device.base import COMM, COMPUTE, DOWN, HOST, UP, Buffer, Device, Event, Run
from zofftk.errors import RankError
from zofftk.host_state import HostBucket, HostSegment
from zofftk.managed import Gathered, Managed, Update
from zofftk.ranks.collectives import all_gather, reduce_to_own
from zofftk.ranks.group import RankGroup
from zofftk.ranks.norms import GRADIENT, NOTHING, ZEROS, NormExchange
from zofftk.ranks.one import ADD, DROP, FLUSH, NORM, STEP, SWITCH
from zofftk.ranks.slices import slice_box
from zofftk.ranks.virtual_group import VirtualGroup
from zofftk.staging import Slot

# What a rank tells the others before it goes on.
ROUND = 1.0
ALIKE = {
    NORM: "asks for a norm, or reads or scales a gradient",
    STEP: "makes a step",
    ADD: "adds parameters",
    DROP: "drops its gradients",
    FLUSH: "flushes what is late",
    SWITCH: "switches its update",
}
NEWS = 0.5  # added to one of these: the rank has gradients whose norm is not known
WORDS = (ROUND, *ALIKE, *(word + NEWS for word in ALIKE))


class ManyRanks:
    """See the module."""

    def __init__(
        self, device: Device, group: RankGroup | VirtualGroup, threads: int, reduce_dtype: torch.dtype | None = None
    ) -> None:
        self._group = group
        self.size, self.rank = group.size, group.rank
        self.members: Sequence[int] = group.members
        self.has_news, self.rounds, self.met = True, 0, 0
        self.check_norm: Callable[[], None] = lambda: None
        self._device, self._threads, self._reduce_dtype = device, threads, reduce_dtype
        self._ready: set[HostBucket] = set()  # full, and waiting for those before them
        self._next = 0  # the bucket that leaves next in this round
        self._buckets: list[HostBucket] = []  # all, in the order they leave in
        self._norms: NormExchange | None = None
        self._updates_with: list[str] = []
        self._settings = self._settings_told = 0.0
        # All there are, written once: a word that the host stream wrote would come after the updates there.
        self._known = device.buffer("words there are", len(WORDS), torch.float64, "host", on_link=True)
        device.touch("words there are", writes=[self._known])
        self._known.tensor.copy_(torch.tensor(WORDS, dtype=torch.float64))
        self._words = device.buffer("words of all ranks", self.size, torch.float64, "host", on_link=True)
        self._words_dev = device.buffer("words of all ranks on the device", self.size, torch.float64, "device")

    def join(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        described = [
            (name, tuple(tensor.shape), str(tensor.dtype), f"slice {box}" if (box := slice_box(tensor)) else "whole")
            for name, tensor in zip(names, tensors, strict=True)
        ]
        self._group.check_same(described, "joining of parameters")
        self._group.take_firsts(tensors, "joining of parameters")

    # -- order -------------------------------------------------------------------------------------------------

    def add(self, buckets: Sequence[HostBucket]) -> None:
        """These leave after all others."""
        self._buckets += buckets
        for bucket in buckets:
            # fp16 is divided on the device: two times 40000 would be infinite.
            bucket.average = 1.0 if bucket.wire.tensor.dtype == torch.float16 else 1.0 / self.size

    def in_turn(self, bucket: HostBucket) -> Iterable[HostBucket]:
        self._ready.add(bucket)
        while self._next < len(self._buckets) and self._buckets[self._next] in self._ready:
            yield self._leave()

    def last_of_round(self) -> Iterable[HostBucket]:
        if self._next or any(bucket.waiting for bucket in self._buckets):
            while self._next < len(self._buckets):
                yield self._leave()
            self.rounds += 1
        self._next = 0

    def round_of_others(self) -> Iterable[HostBucket]:
        return tuple(self._buckets)

    def _leave(self) -> HostBucket:
        if self._next == 0:
            self._tell(ROUND)
        bucket = self._buckets[self._next]
        self._ready.discard(bucket)
        self._next += 1
        return bucket

    def has_left(self, bucket: HostBucket) -> bool:
        return bucket in self._buckets[: self._next]

    # -- words -------------------------------------------------------------------------------------------------

    def others_go_on(self, does: float, *, knows_norm: bool) -> bool:
        if does == NORM:
            self.check_norm()
        knows_all = knows_norm and (does != STEP or self._settings == self._settings_told)
        self._tell(does + (0.0 if knows_all else NEWS))
        words = self._hear()
        kinds = np.floor(words)
        if (kinds == ROUND).any():
            self.rounds += 1
            return True
        if (kinds != kinds[0]).any():
            rank = int((kinds != kinds[0]).argmax())
            first, other = (f"rank {self._named(r)} {ALIKE[float(kinds[r])]}" for r in (0, rank))
            raise RankError(
                f"the ranks have parted: {first} where {other}; every rank has to call clip_grad_norm_, "
                "grad(), step(), flush(), switch_update() and add_param_group() alike, and zero_grad() after a "
                "backward on every rank"
            )
        self.has_news, self.met = bool((words != kinds).any()), self.rounds
        return False

    def _hear(self) -> np.ndarray:
        """What all ranks have told last."""
        device = self._device
        device.wait(
            DOWN, device.record(COMM), "words there: those of all ranks must be on the device before they leave it"
        )
        device.copy_down("down: words", self._words, self._words_dev, [Run(0, self.size)])
        device.synchronize(device.record(DOWN), "wait for ranks: all must say what comes next")
        return device.value("words", self._words)

    def _tell(self, word: float) -> None:
        device, own = self._device, self._words_dev.part(self.rank, 1)
        device.wait(UP, device.record(COMM), "word told: the others must have the one before")
        device.copy_up("up: word", own, self._known.part(WORDS.index(word), 1), [Run(0, 1)])
        device.wait(COMM, device.record(UP), "word on the device: it must be there before all have it")
        self._group.collective("all-gather: words", all_gather, self._words_dev, own)

    # -- gradients ---------------------------------------------------------------------------------------------

    def packed_as(self, wire: torch.dtype) -> torch.dtype:
        return self._reduce_dtype or wire

    def fill(self, bucket: HostBucket, data: Buffer) -> set[int]:
        if len(bucket.waiting) < len(bucket.params):
            self._device.zero(f"zero: {bucket.label}", data)
        return set(bucket.params)

    def bring_down(self, bucket: HostBucket, slot: Slot, data: Buffer, present: set[int]) -> Event:
        device, label, own = self._device, bucket.label, self._reduced_part(bucket, data)
        device.wait(COMM, device.record(COMPUTE), f"packed: {label} must be complete before it leaves")
        self._group.collective(f"reduce-scatter: {label}", reduce_to_own, own, data)
        device.wait(DOWN, device.record(COMM), f"reduced: {label} must be complete before it leaves")
        if bucket.counted is not None:
            device.wait(DOWN, bucket.counted, f"counted: {label} must have been read before it is overwritten")
        device.copy_down(f"down: {label}", bucket.wire, own, bucket.runs(present))
        arrived = device.record(DOWN)
        device.wait(HOST, arrived, f"arrived in wire: {label} must be here before its statistics are taken")
        count = host_tasks.square_sums(bucket, bucket.wire, present, self._threads)
        device.host_task(f"statistics: {label}", count, reads=[bucket.wire], writes=[bucket.square_sums])
        bucket.counted = device.record(HOST)
        return arrived

    def _own_part(self, bucket: HostBucket, data: Buffer) -> Buffer:
        return data.part(self.rank * bucket.shard.numel, bucket.shard.numel)

    def _reduced_part(self, bucket: HostBucket, data: Buffer) -> Buffer:
        """Where this rank's range of the sum goes down from. Where it was summed in another dtype than the wire's,
        that is a place in the ranges of the other ranks, which nobody needs any more."""
        wire = bucket.wire.tensor.dtype
        if data.tensor.dtype == wire:
            return self._own_part(bucket, data)
        other = data.part(0 if self.rank else bucket.shard.numel, bucket.shard.numel)
        return Buffer(data.name, data.place, other.tensor.view(wire)[: bucket.shard.numel], data.clock)

    # -- values ------------------------------------------------------------------------------------------------

    def bring_up(self, update: Update, data: Buffer) -> tuple[Event, Event]:
        device, bucket = self._device, update.bucket
        label, own = bucket.label, self._own_part(bucket, data)
        device.wait(UP, update.written, f"updated: {label} must be written before it leaves")
        device.copy_up(f"up: {label}", own, update.wire, bucket.runs(update.present))
        sent = device.record(UP)
        device.wait(COMM, sent, f"sent: {label} must be on the device before all have it")
        self._group.collective(f"all-gather: {label}", all_gather, data, own)
        return sent, device.record(COMM)

    # -- norms -------------------------------------------------------------------------------------------------

    def take_norms(self, segments: Sequence[HostSegment], managed: Sequence[Managed], norms: Buffer) -> None:
        if self._norms is None or not self._norms.fits(segments, len(managed)):
            self._norms = NormExchange(self._device, self._group, segments, len(managed))
        self._norms.run(segments, managed, norms, self._settings)
        self._settings_told = self._settings

    def settle(self, managed: Sequence[Managed], *, at_step: bool) -> None:
        by_rank, dropped = self._presence(managed)
        self._check_dropped(managed, dropped)
        if at_step:
            self._check_settings()
        else:
            self._check_alike(managed, by_rank)
        for one, presence in zip(managed, by_rank.max(axis=0), strict=True):
            one.dropped = 0 if at_step else one.dropped
            one.elsewhere = presence != NOTHING and one.gathered is not Gathered.LIVE
            for bucket in one.buckets:
                if presence == GRADIENT:
                    bucket.zero.discard(one.index)
                else:
                    bucket.forget({one.index})
                if presence == ZEROS:
                    bucket.zero.add(one.index)

    def _presence(self, managed: Sequence[Managed]) -> tuple[np.ndarray, np.ndarray]:
        """What each rank (rows) has of each parameter, and has dropped."""
        assert self._norms is not None
        return self._norms.presence()

    def update_with(self, hypers: Iterable[object]) -> None:
        distinct = {id(hyper): hyper for hyper in hypers}.values()  # a few, of many parameters
        self._updates_with = list(dict.fromkeys(map(str, distinct)))
        self._settings = float(zlib.crc32("\n".join(self._updates_with).encode()))

    def _check_settings(self) -> None:
        """Each rank updates a part of every parameter: with another learning rate, say, the parts would not fit."""
        assert self._norms is not None
        if len(set(self._norms.settings())) > 1:
            self._group.check_same(self._updates_with, "comparison of settings", "update with other settings")

    def _check_dropped(self, managed: Sequence[Managed], dropped: np.ndarray) -> None:
        """A gradient is summed over ranks on its way: who drops it alone has dropped that of the others too."""
        for index in np.flatnonzero((dropped != dropped[0]).any(axis=0)):
            has, lacks = self._named(int(dropped[:, index].argmax())), self._named(int(dropped[:, index].argmin()))
            raise RankError(
                f"rank {has} has dropped a gradient of {managed[int(index)].name} that rank {lacks} has kept, or not "
                "had: every rank has to call zero_grad() and set_grad() alike, and the optimizer's zero_grad() where "
                "their backwards differ"
            )

    def _check_alike(self, managed: Sequence[Managed], by_rank: np.ndarray) -> None:
        """Who asks for norms, as `clip_grad_norm_` does, asks only for those of gradients it sees."""
        for index in np.flatnonzero((by_rank == NOTHING).any(axis=0) & (by_rank != NOTHING).any(axis=0)):
            nothing = by_rank[:, index] == NOTHING
            has, lacks = self._named(int(nothing.argmin())), self._named(int(nothing.argmax()))
            name = managed[int(index)].name
            raise RankError(
                f"{name} has a gradient on rank {has} and none on rank {lacks}, which would leave it out of the norm: "
                "use the option max_grad_norm in place of clip_grad_norm_"
            )

    def sum_parts(self, flat: torch.Tensor) -> None:
        """Of a gradient of which each rank has filled in its parts: all of it. Nothing else is under way."""
        moved = flat.to(self._words_dev.tensor.device)
        self._group.sum(moved, "sum of a gradient's parts")
        flat.copy_(moved)

    def _named(self, rank: int) -> int:
        """By its number in the world."""
        return self.members[rank]

    def close(self) -> None:
        self._group.close()
