"""PyTorch's DistributedDataParallel with mixed precision: every rank has everything.

Gradients are all-reduced in buckets behind backward, of the last micro-batch where there are several (`no_sync`). 16
bytes a parameter, as the paper counts (its Table 1), and 2 more: in the torch of its time, 1.6, the buckets were a copy
of the gradients, which one process alone has too (they became views of them with 1.7). The mixed-precision optimizer of
Megatron-LM's code makes fp32 gradients, 4 bytes, at its update, and lets them go where the next backward begins: they
are there while the next forward makes its logits.
"""

from __future__ import annotations

from zofftk.baselines import gpu_adam
from zofftk.baselines.machine import Machine
from zofftk.baselines.schedule import Buckets, Schedule
from zofftk.baselines.workload import Workload
from zofftk.device.base import Event
from zofftk.virtual.events import ParamId, Part

BUCKET_BYTES = 25 * 2**20  # DDP's default
WIDE = "fp32 copy of the gradients"


class DDP(Schedule):
    name = "PyTorch DDP"

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        machine.hold("16-bit parameters", "device", 2 * self.num_params)
        machine.hold("16-bit gradients", "device", 2 * self.num_params)
        machine.hold("copy of the gradients in buckets", "device", 2 * self.num_params)
        machine.hold("fp32 parameters and moments", "device", gpu_adam.STATES_BYTES * self.num_params)
        self._buckets = Buckets(BUCKET_BYTES // 2)
        self._reduced: Event | None = None
        self._has_wide = False

    def enter(self, part: Part) -> None:
        if part.name == "backward" and self._has_wide:
            self._has_wide = False
            self.machine.line.change(WIDE, -4 * self.num_params)

    def gradient(self, param: ParamId, numel: int) -> None:
        if not self.is_first:
            self.machine.move("add to the gradient", 6 * numel)
        if self.is_last:
            self.machine.move("into a bucket", 4 * numel)
            self._reduce(self._buckets.add(numel))

    def _reduce(self, numel: int) -> None:
        if numel and self.ranks > 1:
            bucket = self.machine.buffer("bucket", "device", 2 * numel)
            self._reduced = self.machine.reduce("all-reduce", bucket, self.ranks, [self.machine.computed()])

    def end_backward(self) -> None:
        if self.is_last:
            self._reduce(self._buckets.take())

    def step(self) -> None:
        self.machine.compute_waits(self._reduced)
        self.machine.move("out of the buckets", 4 * self.num_params)
        self._has_wide = True
        self.machine.line.change(WIDE, 4 * self.num_params)
        gpu_adam.update(self.machine, self.num_params, self.workload.largest_param)
