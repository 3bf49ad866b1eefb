"""L2L (layer to layer): everything lives on the host, and one layer at a time is on the GPU.

A layer's 16-bit parameters go up for its forward and for its backward; then its fp32 parameters and moments go up, the
GPU updates them, and they go down: 2 + 2 + 12 + 12 = 28 bytes a parameter, which is what the paper counts. Every move
is synchronous. Activations kept for backward stay on the GPU. It runs on one GPU: more of them do not help it.

Assumed, for what the paper does not say: with several micro-batches a step, the states come with the last one, and the
16-bit gradients of those before it go down and come up again; what is in no layer moves as one more layer.
"""

from __future__ import annotations

from zofftk.baselines import gpu_adam
from zofftk.baselines.machine import DOWN, UP, Machine
from zofftk.baselines.schedule import Schedule
from zofftk.baselines.workload import Workload
from zofftk.device.base import StreamName
from zofftk.virtual.events import Part

ON_GPU = "16-bit parameters and gradients of one layer"
STATES = "fp32 parameters and moments of one layer"


class L2L(Schedule):
    name = "L2L"

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        machine.hold("16-bit parameters", "host", 2 * self.num_params)
        machine.hold("fp32 parameters and moments", "host", gpu_adam.STATES_BYTES * self.num_params)
        machine.hold("16-bit gradients", "host", 2 * self.num_params)

    def enter(self, part: Part) -> None:
        if part.layer >= 0:
            numel = self.workload.params_of(part.layer)
            self.machine.line.change(ON_GPU, (2 if part.name == "forward" else 4) * numel)
            self._move(UP, f"{part.name}: parameters", 2 * numel)

    def leave(self, part: Part) -> None:
        numel = self.workload.params_of(part.layer)
        if part.name == "forward":
            self.machine.line.change(ON_GPU, -2 * numel)
        elif part.name == "backward":
            self._end_layer(numel)

    def _end_layer(self, numel: int) -> None:
        """Its gradients are complete."""
        if not self.is_first:
            self._move(UP, "gradients so far", 2 * numel)
            self.machine.move("add to the gradient", 6 * numel)
        if self.is_last:
            self._update(numel)
        else:
            self._move(DOWN, "gradients so far", 2 * numel)
        self.machine.line.change(ON_GPU, -4 * numel)

    def _update(self, numel: int) -> None:
        machine = self.machine
        machine.line.change(STATES, gpu_adam.STATES_BYTES * numel)
        self._move(UP, "states", gpu_adam.STATES_BYTES * numel)
        gpu_adam.update(machine, numel, numel)
        self._move(DOWN, "states", gpu_adam.STATES_BYTES * numel)
        machine.line.change(STATES, -gpu_adam.STATES_BYTES * numel)

    def micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        numel = self.workload.params_of(-1)
        self.machine.line.change(ON_GPU, 4 * numel)
        for when in ("forward", "backward"):
            self._move(UP, f"{when}: parameters in no layer", 2 * numel)
        super().micro_batch(is_first=is_first, is_last=is_last)
        self._end_layer(numel)

    def _move(self, stream: StreamName, label: str, nbytes: int) -> None:
        """Compute stands still meanwhile."""
        machine = self.machine
        on_gpu, on_host = (machine.buffer(label, place, nbytes) for place in ("device", "host"))
        dst, src = (on_host, on_gpu) if stream == DOWN else (on_gpu, on_host)
        machine.compute_waits(machine.copy(stream, label, dst, src, [machine.computed()]))
