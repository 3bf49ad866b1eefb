"""The way of new values from the wire into the parameters: through a staging slot each, in the order of their update.

    updated -> (a slot is free) -> in flight -> (somebody reads) -> landed

Only what lands is in the parameters, and `land` is where compute waits for it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch

from zofftk import pending
from zofftk.ambient import undisturbed
from zofftk.deferred_interrupts import interrupts_deferred
from zofftk.device.base import COMPUTE, UP, Device
from zofftk.host_state import HostBucket
from zofftk.managed import Arrival, Managed, Update
from zofftk.ranks.one import Ranks
from zofftk.staging import StagingRing


class WayUp:
    """See the module. `managed` is the engine's list of parameters, which grows; `kept_free` slots are left alone."""

    def __init__(
        self, device: Device, ranks: Ranks, ring: StagingRing, managed: Sequence[Managed], *, kept_free: int = 0
    ) -> None:
        self._device = device
        self._ranks = ranks
        self._kept_free = kept_free
        self._ring = ring
        self._managed = managed
        self.updated: OrderedDict[HostBucket, Update] = OrderedDict()  # waiting for a slot
        self.in_flight: OrderedDict[HostBucket, Arrival] = OrderedDict()
        self._lock = threading.RLock()  # a thread that logs may read a parameter
        _alive.add(self)

    @property
    def has_room(self) -> bool:
        return self._ring.free > self._kept_free

    def add(self, updates: Sequence[Update]) -> None:
        """These are to be sent, after those that wait already."""
        with self._lock, interrupts_deferred():
            for update in updates:
                self.updated[update.bucket] = update
            self.send()

    def send(self) -> None:
        """Start the next buckets, as many as there are free slots."""
        with self._lock, interrupts_deferred():  # another thread may read a parameter meanwhile
            while self.updated and self.has_room:
                bucket, update = next(iter(self.updated.items()))
                slot = self._ring.acquire(UP)
                sent, landed = self._ranks.bring_up(update, slot.typed(bucket.bucket, update.wire.tensor.dtype))
                bucket.sent[update.wire] = sent
                self.in_flight[bucket] = Arrival(update, slot, landed)
                del self.updated[bucket]

    def watch(self, managed: Managed) -> None:
        """Whoever reads this parameter lands it first; one that can be read unseen lands now."""
        with self._lock:  # another thread may land it meanwhile, which only one that is watched is told
            if not self.is_under_way(managed):
                return
            # Autograd must not go on with a graph from before the step: it looks at the version alone.
            torch.autograd.graph.increment_version(managed.tensor)
            managed.note()
            land, is_whole = partial(self.land, managed), managed.local is managed.tensor
            if _has_aliases(managed.local) or not is_whole or not pending.mark(managed.tensor, land):
                land()

    def is_under_way(self, managed: Managed) -> bool:
        return any(bucket in self.in_flight or bucket in self.updated for bucket in managed.buckets)

    def land(self, managed: Managed) -> None:
        """A parameter is about to be read: compute goes on when its new value is there."""
        with self._lock, interrupts_deferred():
            while self.is_under_way(managed):
                self.land_next()

    def land_all(self) -> None:
        """All parameters are about to be read."""
        if self.in_flight:
            with self._lock, interrupts_deferred():
                while self.in_flight:
                    self.land_next()

    def land_before_backward(self, managed: Managed) -> None:
        """A gradient has come: free the slots from what no forward has read since the step."""
        if not self.in_flight:
            return
        self._device.check_going()
        if self.is_under_way(managed):
            raise RuntimeError(
                f"forward has used {managed.name} before its new value had arrived, through code that torch does not "
                "see and without calling its module: call synchronize() on the optimizer after step()"
            )
        self.land_all()

    def land_next(self) -> None:
        """Those that were sent first; after a fault all is as before, so that whoever reads next meets it again."""
        bucket, arrival = next(iter(self.in_flight.items()))
        placement = bucket.placement(arrival.update.present)
        landed = [self._managed[piece.param] for piece in placement.pieces]
        with undisturbed():
            self._device.wait(COMPUTE, arrival.landed, f"wait for values: {bucket.label} must have arrived")
            written = [managed.name for managed in landed if managed.tensor._version != managed.version]
            data = arrival.slot.typed(bucket.bucket, arrival.update.wire.tensor.dtype)
            self._device.copy_back(f"copy back: {bucket.label}", data, placement, [m.local for m in landed])
            torch.autograd.graph.increment_version([m.tensor for m in landed if m.local is not m.tensor])
            for managed in landed:
                managed.version = managed.tensor._version
            emptied = self._device.record(COMPUTE)
        del self.in_flight[bucket]
        for managed in landed:
            if not self.is_under_way(managed):
                pending.unmark(managed.tensor)
        self._ring.release(arrival.slot, emptied)
        self.send()
        if written:
            raise RuntimeError(
                f"{written[0]} was written to after step() and before its new value had arrived, by code that torch "
                "does not see; what it wrote is lost: call synchronize() on the optimizer before"
            )

    def unseen(self, error: Exception) -> None:
        """Whoever waits next is told."""
        self._device.unseen(error)

    def drop(self) -> None:
        """Nothing will arrive any more: parameters keep the values they have."""
        self.in_flight.clear()
        self.updated.clear()
        for managed in self._managed:
            pending.unmark(managed.tensor)


def _has_aliases(tensor: torch.Tensor) -> bool:
    """Other tensors share its memory (`detach()`, views, a kept state dict): whoever reads those is not seen."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor, and `storage`


_alive: weakref.WeakSet[WayUp] = weakref.WeakSet()


def _land_before_fork() -> None:
    """The child has the parent's memory, but not the threads that would bring the values."""
    for way_up in list(_alive):
        try:
            way_up.land_all()
        except Exception as error:  # a fork has nobody who could be told
            way_up.unseen(error)


os.register_at_fork(before=_land_before_fork)
