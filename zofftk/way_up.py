"""The way of new values from the wire into the parameters: through a staging slot each, in the order of their update.

    updated -> (a slot is free) -> in flight -> (somebody reads) -> landed

Only what lands is in the parameters, and `land` is where compute waits for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from zofftk import pending
from zofftk.device.base import COMPUTE, UP, Device
from zofftk.host_state import HostBucket
from zofftk.managed import Arrival, Managed, Update
from zofftk.staging import StagingRing


class WayUp:
    """See the module. `managed` is the engine's list of parameters, which grows."""

    def __init__(self, device: Device, ring: StagingRing, managed: Sequence[Managed]) -> None:
        self._device = device
        self._ring = ring
        self._managed = managed
        self.updated: OrderedDict[HostBucket, Update] = OrderedDict()  # waiting for a slot
        self.in_flight: OrderedDict[HostBucket, Arrival] = OrderedDict()
        self.landing = False  # the engine itself writes into parameters
        self._lock = threading.RLock()  # a thread that logs may read a parameter

    def send(self) -> None:
        """Start the next buckets, as many as there are free slots."""
        with self._dropped_on_a_fault():
            while self.updated and self._ring.free:
                bucket, update = self.updated.popitem(last=False)
                self._device.wait(UP, update.written, f"updated: {bucket.label} must be written before it leaves")
                slot = self._ring.acquire(UP)
                data = slot.typed(bucket.wire.tensor.dtype)
                self._device.copy_up(f"up: {bucket.label}", data, bucket.wire, bucket.runs(update.present))
                bucket.sent = self._device.record(UP)
                self.in_flight[bucket] = Arrival(update, slot, bucket.sent)

    def watch(self, managed: Managed) -> None:
        """Whoever reads this parameter lands it first; one of a kind that cannot be watched lands now."""
        land = partial(self.land, managed)
        if self.is_under_way(managed) and not pending.mark(managed.tensor, land):
            land()

    def is_under_way(self, managed: Managed) -> bool:
        return any(bucket in self.in_flight or bucket in self.updated for bucket in managed.buckets)

    def land(self, managed: Managed) -> None:
        """A parameter is about to be read: compute goes on when its new value is there."""
        with self._lock:
            while self.is_under_way(managed):
                self._land_next()

    def land_all(self) -> None:
        """All parameters are about to be read."""
        with self._lock:
            while self.in_flight:
                self._land_next()

    def land_before_backward(self, managed: Managed) -> None:
        """A gradient has come: free the slots from what no forward has read since the step."""
        if not self.in_flight:
            return
        if self.is_under_way(managed):
            raise RuntimeError(
                f"forward has used {managed.name} before its new value had arrived, through code that torch does not "
                "see and without calling its module: call synchronize() on the optimizer after step()"
            )
        self.land_all()

    def _land_next(self) -> None:
        bucket, arrival = next(iter(self.in_flight.items()))
        placement = bucket.placement(arrival.update.present)
        landed = [self._managed[piece.param] for piece in placement.pieces]
        with self._dropped_on_a_fault(), torch._C.DisableTorchFunctionSubclass():  # these reads do not have to wait
            self._device.wait(COMPUTE, arrival.landed, f"wait for values: {bucket.label} must have arrived")
            written = [managed.name for managed in landed if managed.tensor._version != managed.version]
            data = arrival.slot.typed(bucket.wire.tensor.dtype)
            self.landing = True
            self._device.copy_back(f"copy back: {bucket.label}", data, placement, [m.tensor for m in landed])
            self.landing = False
            for managed in landed:
                managed.version = managed.tensor._version
        del self.in_flight[bucket]
        self._unwatch(landed)
        self._ring.release(arrival.slot, self._device.record(COMPUTE))
        self.send()
        if written:
            raise RuntimeError(
                f"{written[0]} was written to after step() and before its new value had arrived, by code that torch "
                "does not see; what it wrote is lost: call synchronize() on the optimizer before"
            )

    def _unwatch(self, landed: Sequence[Managed]) -> None:
        for managed in landed:
            if not self.is_under_way(managed):
                pending.unmark(managed.tensor)

    @contextmanager
    def _dropped_on_a_fault(self) -> Iterator[None]:
        """After a fault nothing will arrive: the parameters keep the values they have."""
        try:
            yield
        except BaseException:
            self.landing = False
            self.in_flight.clear()
            self.updated.clear()
            self._unwatch(self._managed)
            raise
