"""Megatron-LM: each layer cut over the slices, and everything else as with data parallelism.

The sums over slices, two in forward, two in recomputation and two in backward of each layer, are the model's
(`gpt_2020`). Ranks with other data add their gradients up after backward, not behind it, as its own
DistributedDataParallel did; each device updates its slice. 16 bytes for each parameter of the slice.
"""

from __future__ import annotations

from zofftk.baselines import gpu_adam
from zofftk.baselines.machine import Machine
from zofftk.baselines.schedule import Schedule
from zofftk.baselines.workload import Workload
from zofftk.virtual.events import ParamId


class Megatron(Schedule):
    name = "Megatron"

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        machine.hold("16-bit parameters", "device", 2 * self.num_params)
        self._gradients_held = machine.hold("16-bit gradients", "device", 2 * self.num_params)
        machine.hold("fp32 parameters and moments", "device", gpu_adam.STATES_BYTES * self.num_params)

    def gradient(self, param: ParamId, numel: int) -> None:
        if not self.is_first:
            self.machine.move("add to the gradient", 6 * numel)

    def step(self) -> None:
        machine = self.machine
        if self.ranks > 1:
            reduced = machine.reduce("all-reduce", self._gradients_held, self.ranks, [machine.computed()])
            machine.compute_waits(reduced)
        gpu_adam.update(machine, self.num_params, self.workload.largest_param)
