"""SwapAdvisor: a plan, found by genetic search, of which tensors leave the GPU and when they come back.

Its plans are not known from the paper. Assumed here: what a search finds when it swaps what is idle longest. That are
the fp32 parameters and moments, used once a step, layer by layer: 12 bytes a parameter up and 12 down, the next layer's
behind the update of this one. 16-bit parameters and gradients, used in every micro-batch, stay. The update is on the
GPU; one GPU is used, since the paper gives the same size for all numbers of GPUs.
"""

from __future__ import annotations

from zofftk.baselines import gpu_adam
from zofftk.baselines.machine import DOWN, UP, Machine
from zofftk.baselines.schedule import Schedule
from zofftk.baselines.workload import Workload
from zofftk.device.base import Event
from zofftk.virtual.events import ParamId

STATES = "fp32 parameters and moments of two layers"


class SwapAdvisor(Schedule):
    name = "SwapAdvisor"

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        machine.hold("16-bit parameters", "device", 2 * self.num_params)
        machine.hold("16-bit gradients", "device", 2 * self.num_params)
        machine.hold("fp32 parameters and moments", "host", gpu_adam.STATES_BYTES * self.num_params)

    def gradient(self, param: ParamId, numel: int) -> None:
        if not self.is_first:
            self.machine.move("add to the gradient", 6 * numel)

    def step(self) -> None:
        machine = self.machine
        sent: list[Event | None] = [None, machine.computed()]
        for layer in (*range(self.workload.config.layers), -1):
            numel = self.workload.params_of(layer)
            nbytes = gpu_adam.STATES_BYTES * numel
            on_gpu, on_host = (machine.buffer("states", place, nbytes) for place in ("device", "host"))
            # There is room for two layers.
            machine.line.change(STATES, 2 * nbytes)
            machine.compute_waits(machine.copy(UP, "states up", on_gpu, on_host, sent[-2:-1]))
            gpu_adam.update(machine, numel, self.workload.largest_param)
            sent.append(machine.copy(DOWN, "states down", on_host, on_gpu, [machine.computed()]))
            machine.line.change(STATES, -2 * nbytes)
