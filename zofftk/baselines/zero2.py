"""ZeRO-2 as DeepSpeed released it: parameters on every rank, gradients and optimizer states cut over the ranks.

Gradients fill buckets, which are reduce-scattered behind backward of every micro-batch; each rank updates its shard on
the GPU, and the parameters are all-gathered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from zofftk.baselines import gpu_adam
from zofftk.baselines.machine import Machine
from zofftk.baselines.schedule import Buckets, Schedule
from zofftk.baselines.workload import Workload
from zofftk.device.base import Buffer, Event, StreamName
from zofftk.virtual.events import ParamId

BUCKET_NUMEL = 50_000_000  # in the configuration that the release's example scripts have
BUCKET_SPACE = 4.5  # what the release takes for a bucket, in buckets ...
NUM_BUCKETS = 2  # ... of which there are two with `overlap_comm`


class Reducing(Schedule, ABC):
    """Reduce-scatter of buckets behind backward; what is done with the rank's part differs."""

    bucket_numel, bucket_space = BUCKET_NUMEL, BUCKET_SPACE

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        self._buckets = Buckets(self.bucket_numel)
        self._reduced: tuple[Buffer, int, Event] | None = None
        space = round(NUM_BUCKETS * self.bucket_space * self.bucket_numel * 2)
        machine.hold("gradient buckets", "device", space)

    def gradient(self, param: ParamId, numel: int) -> None:
        self.machine.move("into a bucket", 4 * numel)
        self._reduce(self._buckets.add(numel))

    def end_backward(self) -> None:
        self._reduce(self._buckets.take())
        self._take_in()

    def _take_in(self) -> None:
        """What is done with a bucket's part comes when the next bucket is full: there are two, so that one is reduced
        while backward fills the other (`overlap_comm`)."""
        if self._reduced is not None:
            reduced, self._reduced = self._reduced, None
            self.averaged(*reduced)

    def _reduce(self, numel: int) -> None:
        if not numel:
            return
        machine, shard = self.machine, self.shard(numel)
        own = machine.buffer("own part", "device", 2 * shard)
        averaged = machine.computed()
        if self.ranks > 1:
            bucket = machine.buffer("bucket", "device", 2 * shard * self.ranks)
            averaged = machine.scatter("reduce-scatter", bucket, own, [averaged])
        self._take_in()
        self._reduced = own, shard, averaged

    def to_owners(
        self, stream: StreamName, label: str, dst: Buffer, src: Buffer, after: Sequence[Event | None], numel: int
    ) -> Event:
        """Over the link, in a bucket of `numel` elements a rank.

        Ranks own parameters in one piece, one rank after the other, so that most of a bucket is one rank's: it crosses
        that rank's link alone while the others wait, and more ranks do not make it quicker.
        """
        bucket = numel * self.ranks
        owners = max(1, -(-bucket // self.shard(self.num_params)))
        nbytes = min(dst.nbytes, src.nbytes) * self.ranks
        return self.machine.copy_in_turn(stream, label, dst, src, after, all_bytes=nbytes, owners=owners)

    @abstractmethod
    def averaged(self, own: Buffer, numel: int, done: Event) -> None:
        """This rank's part of a bucket, of so many elements, is there after `done`."""


class ZeRO2(Reducing):
    name = "ZeRO-2"

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        self._numel = self.shard(self.num_params)
        self._params = machine.hold("16-bit parameters", "device", 2 * self._numel * self.ranks)
        machine.hold("16-bit gradients of the shard", "device", 2 * self._numel)
        machine.hold("fp32 parameters and moments of the shard", "device", gpu_adam.STATES_BYTES * self._numel)
        self._averaged: Event | None = None

    def averaged(self, own: Buffer, numel: int, done: Event) -> None:
        self._averaged = done

    def step(self) -> None:
        machine = self.machine
        machine.compute_waits(self._averaged)
        # The release joins its shard's gradients into one tensor and widens that.
        machine.line.change("gradients of the shard in one piece", 2 * self._numel)
        gpu_adam.update(machine, self._numel, self._numel)
        machine.line.change("gradients of the shard in one piece", -2 * self._numel)
        if self.ranks > 1:
            shard = self._params.part(0, 2 * self._numel)
            machine.compute_waits(machine.gather("all-gather", self._params, shard, [machine.computed()]))
