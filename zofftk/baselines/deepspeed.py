"""DeepSpeed 0.19 (2026), ZeRO-2 with `offload_optimizer`, with the bytes that its code moves and keeps.

As in 2020, but: buckets of 5e8 elements by default, two of them; at the last micro-batch the host looks at every
gradient's overflow flag before the next can be sent; the update is one pass that scales, one of Adam and one cast to 16
bits, each over the whole shard, then one copy of 2 bytes a parameter: nothing overlaps it. Page-locked buffers are
rounded up to powers of two, as torch's allocator does.
"""

from __future__ import annotations

from zofftk.baselines import gpu_adam
from zofftk.baselines.host_sums import SummingOnHost
from zofftk.baselines.machine import DOWN, UP, Machine
from zofftk.baselines.workload import Workload
from zofftk.device.base import Event

BUCKET_NUMEL = 500_000_000  # `reduce_bucket_size`
WIDE = "fp32 copy of gradients on their way"


def locked_bytes(nbytes: int) -> int:
    """What torch's allocator of page-locked memory takes."""
    return 1 << max(0, nbytes - 1).bit_length()


class DeepSpeed(SummingOnHost):
    name = "DeepSpeed (2026)"
    bucket_numel, bucket_space = BUCKET_NUMEL, 1.0

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        numel = self._numel = self.shard(self.num_params)
        self._params = machine.hold("16-bit parameters", "device", 2 * numel * self.ranks)
        machine.hold("fp32 parameters of the shard", "host", locked_bytes(4 * numel))
        machine.hold("moments of the shard", "host", 8 * numel)
        machine.hold("fp32 gradients of the shard", "host", locked_bytes(4 * numel))
        machine.hold("16-bit parameters on their way", "host", locked_bytes(2 * numel))
        machine.hold("16-bit sums of the shard", "host", locked_bytes(2 * numel))
        self._wire, self._wide = (machine.buffer(name, "host", size * numel) for name, size in (("16", 2), ("32", 4)))
        self._sums = machine.buffer("sums", "host", 2 * numel)

    def send_sum(self, numel: int) -> Event:
        machine = self.machine
        wide = machine.buffer("fp32 gradients", "device", 4 * numel)
        machine.line.change(WIDE, 4 * self.shard(self.workload.largest_param))
        machine.move("norm and check", 2 * numel)
        machine.device.synchronize(machine.computed(), "look at the overflow flags")
        machine.move("gradients to fp32", gpu_adam.WIDEN_BYTES * numel)
        arrived = self.to_owners(DOWN, "gradients down", self._wide, wide, [machine.computed()], numel)
        machine.line.change(WIDE, -4 * self.shard(self.workload.largest_param))
        return arrived

    def step(self) -> None:
        machine = self.machine
        scaled = machine.on_host("scale", self._wide, [self._down])
        updated = machine.on_host("Adam", self._wide, [scaled], updates=self._numel)
        narrow = machine.buffer("fp32 parameters read, 16-bit written", "host", 3 * self._numel)
        cast = machine.on_host("cast", narrow, [updated])
        machine.compute_waits(machine.copy(UP, "parameters up", self._params, self._wire, [cast, machine.computed()]))
        if self.ranks > 1:
            shard = self._params.part(0, 2 * self._numel)
            machine.compute_waits(machine.gather("all-gather", self._params, shard, [machine.computed()]))
