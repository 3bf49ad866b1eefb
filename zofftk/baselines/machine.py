"""A virtual device with a ledger: what a schedule holds there, what the model takes beside it, and the peak of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from zofftk.device.base import COMM, COMPUTE, DOWN, HOST, UP, Buffer, Event, Place, Run, StreamName
from zofftk.device.virtual import VirtualDevice
from zofftk.virtual.device_memory import rounded
from zofftk.virtual.durations import Durations

ACTIVATIONS, GRADIENTS = "activations", "gradients of the layer"


class Line:
    """Bytes that come and go on the device, by what they are for; `peak` is what there was when most was there."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._total = self._most = 0

    def change(self, what: str, nbytes: int) -> None:
        """`nbytes` more, or less where it is negative; the allocator rounds each block up."""
        delta = rounded(nbytes) if nbytes > 0 else -rounded(-nbytes)
        self.live[what] += delta
        self._total += delta
        if self._total > self._most:
            self._most, self.peak = self._total, Counter({name: n for name, n in self.live.items() if n})


class Machine:
    """One of the devices of `durations` and its part of a host.

    `device_bytes` and `host_bytes` are what is held all the time, by name. Buffers are of bytes; every operation waits
    for what the caller names, and the race clock of the device fails where that is too little.
    """

    def __init__(self, durations: Durations, *, keep_spans: bool = False) -> None:
        self.durations = durations
        self.device = VirtualDevice(durations, keep_spans=keep_spans)
        self.line = Line()
        self.device_bytes: dict[str, int] = {}
        self.host_bytes: dict[str, int] = {}
        self.flops = 0
        self.device.open_comm()

    # -- memory ------------------------------------------------------------------------------------------------

    def hold(self, name: str, place: Place, nbytes: int) -> Buffer:
        """Memory that stays."""
        kept = self.device_bytes if place == "device" else self.host_bytes
        kept[name] = kept.get(name, 0) + nbytes
        return self.buffer(name, place, nbytes)

    def buffer(self, name: str, place: Place, nbytes: int) -> Buffer:
        """A name for memory that is counted elsewhere: a part of what is held, or of the line."""
        return self.device.buffer(name, nbytes, torch.uint8, place)

    # -- work --------------------------------------------------------------------------------------------------

    def move(self, label: str, nbytes: float) -> None:
        """On compute: one kernel that reads and writes so many bytes."""
        if nbytes:
            self.device.compute(label, self.durations.move_ns(round(nbytes)))

    def copy(self, stream: StreamName, label: str, dst: Buffer, src: Buffer, after: Sequence[Event | None]) -> Event:
        """All of the smaller of the two, from its beginning, on the link."""
        self._wait(stream, after)
        run = [Run(0, min(dst.nbytes, src.nbytes))]
        (self.device.copy_down if stream == DOWN else self.device.copy_up)(label, dst, src, run)
        return self.device.record(stream)

    def copy_in_turn(
        self,
        stream: StreamName,
        label: str,
        dst: Buffer,
        src: Buffer,
        after: Sequence[Event | None],
        *,
        all_bytes: int,
        owners: int,
    ) -> Event:
        """This device's average part of `all_bytes`, which belong to so many devices in a row; all wait for them."""
        copied = self.copy(stream, label, dst, src, after)
        own_ns = self.durations.copy_ns(stream, min(dst.nbytes, src.nbytes), 1)
        rest_ns = self.durations.turns_ns(stream, all_bytes, owners) - own_ns
        if rest_ns <= 0:
            return copied
        self.device.stand_still(stream, f"{label}: of others", rest_ns)
        return self.device.record(stream)

    def scatter(self, label: str, whole: Buffer, shard: Buffer, after: Sequence[Event | None]) -> Event:
        """Reduce-scatter: `shard` becomes this rank's part of the sum."""
        return self._collective(label, shard, whole, after)

    def gather(self, label: str, whole: Buffer, shard: Buffer, after: Sequence[Event | None]) -> Event:
        """All-gather: `whole` becomes what all ranks have."""
        return self._collective(label, whole, shard, after)

    def reduce(self, label: str, whole: Buffer, ranks: int, after: Sequence[Event | None]) -> Event:
        """All-reduce, as a reduce-scatter and an all-gather, which is what a ring does."""
        shard = whole.part(0, -(-whole.nbytes // ranks))
        self.scatter(f"{label}: sum", whole, shard, after)
        return self.gather(f"{label}: share", whole, shard, ())

    def _collective(self, label: str, dst: Buffer, src: Buffer, after: Sequence[Event | None]) -> Event:
        self._wait(COMM, after)
        self.device.collective(label, lambda into, out_of: None, dst, src)
        return self.device.record(COMM)

    def on_host(self, label: str, buffer: Buffer, after: Sequence[Event | None], *, updates: int = 0) -> Event:
        """A task that updates so many parameters, or else reads and writes all of `buffer`."""
        self._wait(HOST, after)
        self.device.host_task(label, lambda: None, reads=(buffer,), writes=(buffer,), updates=updates)
        return self.device.record(HOST)

    def computed(self) -> Event:
        """What compute has been given so far is done."""
        return self.device.record(COMPUTE)

    def compute_waits(self, *events: Event | None) -> None:
        self._wait(COMPUTE, events)

    def _wait(self, stream: StreamName, events: Sequence[Event | None]) -> None:
        for event in events:
            if event is not None:
                self.device.wait(stream, event, f"wait for {event.stream}")

    @property
    def peak_bytes(self) -> dict[str, int]:
        """All that is on the device when most is."""
        return self.device_bytes | dict(self.line.peak)


__all__ = ["ACTIVATIONS", "COMPUTE", "DOWN", "GRADIENTS", "UP", "Line", "Machine"]
