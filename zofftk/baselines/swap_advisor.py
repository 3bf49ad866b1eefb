"""SwapAdvisor: a plan, found by genetic search, of which tensors leave the GPU and when they come back.

Its plans are not known from the paper. Assumed here: what a search finds when it swaps what is idle longest. That are
the fp32 parameters and moments, used once, and the gradients between backward and their update; 16-bit parameters, used
twice in every layer, stay. Gradients go down behind backward, 2 bytes a parameter; then layer by layer 14 come up and
12 go down, the next layer's behind the update of this one.

A plan is of one data-flow graph, and a graph of MXNet, for which it was written, is a whole iteration, update included:
the states travel with every micro-batch. The update is on the GPU; one GPU is used, since the paper gives the same size
for all numbers of GPUs.
"""

from __future__ import annotations

from zofftk.baselines import gpu_adam
from zofftk.baselines.machine import DOWN, UP, Machine
from zofftk.baselines.schedule import Schedule
from zofftk.baselines.workload import Workload
from zofftk.device.base import Event
from zofftk.virtual.events import ParamId

STATES = "fp32 states and gradients of two layers"
UP_BYTES = gpu_adam.STATES_BYTES + 2


class SwapAdvisor(Schedule):
    name = "SwapAdvisor"

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        machine.hold("16-bit parameters", "device", 2 * self.num_params)
        self._gradients_held = machine.hold("16-bit gradients", "host", 2 * self.num_params)
        machine.hold("fp32 parameters and moments", "host", gpu_adam.STATES_BYTES * self.num_params)
        self._down: Event | None = None

    def gradient(self, param: ParamId, numel: int) -> None:
        machine = self.machine
        own = machine.buffer("gradient", "device", 2 * numel)
        self._down = machine.copy(DOWN, "gradients down", self._gradients_held, own, [machine.computed()])

    def end_backward(self) -> None:
        machine = self.machine
        sent: list[Event | None] = [None, self._down]
        for layer in (*range(self.workload.config.layers), -1):
            numel = self.workload.params_of(layer)
            on_gpu, on_host = (machine.buffer("states", place, UP_BYTES * numel) for place in ("device", "host"))
            # There is room for two layers.
            machine.line.change(STATES, 2 * UP_BYTES * numel)
            machine.compute_waits(machine.copy(UP, "states up", on_gpu, on_host, sent[-2:-1]))
            gpu_adam.update(machine, numel, self.workload.largest_param)
            own = on_gpu.part(0, gpu_adam.STATES_BYTES * numel)
            sent.append(machine.copy(DOWN, "states down", on_host, own, [machine.computed()]))
            machine.line.change(STATES, -2 * UP_BYTES * numel)
