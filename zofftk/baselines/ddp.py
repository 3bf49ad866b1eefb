"""PyTorch's DistributedDataParallel with mixed precision: every rank has everything.

Gradients are all-reduced in buckets behind backward, of the last micro-batch where there are several (`no_sync`). They
lie in the buckets, and are summed there: 16 bytes a parameter, as the paper counts (its Table 1). Before torch 1.7, the
buckets were a copy, of 2 bytes more.
"""

from __future__ import annotations

from zofftk.baselines import gpu_adam
from zofftk.baselines.machine import Machine
from zofftk.baselines.schedule import Buckets, Schedule
from zofftk.baselines.workload import Workload
from zofftk.device.base import Event
from zofftk.virtual.events import ParamId

BUCKET_BYTES = 25 * 2**20  # DDP's default


class DDP(Schedule):
    name = "PyTorch DDP"

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        machine.hold("16-bit parameters", "device", 2 * self.num_params)
        machine.hold("16-bit gradients", "device", 2 * self.num_params)
        machine.hold("fp32 parameters and moments", "device", gpu_adam.STATES_BYTES * self.num_params)
        self._buckets = Buckets(BUCKET_BYTES // 2)
        self._reduced: Event | None = None

    def gradient(self, param: ParamId, numel: int) -> None:
        if not self.is_first:
            self.machine.move("add to the gradient", 6 * numel)
        if self.is_last and self.ranks > 1:
            self._reduce(self._buckets.add(numel))

    def _reduce(self, numel: int) -> None:
        if numel:
            bucket = self.machine.buffer("bucket", "device", 2 * numel)
            self._reduced = self.machine.reduce("all-reduce", bucket, self.ranks, [self.machine.computed()])

    def end_backward(self) -> None:
        if self.is_last:
            self._reduce(self._buckets.take())

    def step(self) -> None:
        self.machine.compute_waits(self._reduced)
        gpu_adam.update(self.machine, self.num_params, self.workload.largest_param)
