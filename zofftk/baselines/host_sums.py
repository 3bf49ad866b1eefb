"""What the releases of ZeRO-Offload do with several micro-batches: the 16-bit sum so far waits on the host."""

from __future__ import annotations

from abc import abstractmethod

from zofftk.baselines.machine import DOWN, UP
from zofftk.baselines.zero2 import Reducing
from zofftk.device.base import Buffer, Event


class SummingOnHost(Reducing):
    """The sum comes up, is added to, and goes down again with every micro-batch but the last, whose sum is sent."""

    _sums: Buffer  # of this rank's shard, on the host
    _down: Event | None = None  # the last copy down

    def averaged(self, own: Buffer, numel: int, done: Event) -> None:
        machine = self.machine
        machine.compute_waits(done)
        if not self.is_first:
            so_far = machine.buffer("sum so far", "device", 2 * numel)
            # The hook fetches it, so that compute stands still meanwhile.
            up = self.to_owners(UP, "sum up", so_far, self._sums, [self._down, machine.computed()], numel)
            machine.compute_waits(up)
            machine.move("add to the sum", 6 * numel)
        if self.is_last:
            self._down = self.send_sum(numel)
        else:
            self._down = self.to_owners(DOWN, "sum down", self._sums, own, [machine.computed()], numel)

    @abstractmethod
    def send_sum(self, numel: int) -> Event:
        """To the host, where it is updated with; the event is when it has arrived."""
