"""ZeRO-3: parameters, gradients and optimizer states are all cut over the ranks.

A layer's parameters are gathered before its forward and again before its backward, the next layer's meanwhile, and let
go after it. What is in no layer (the embeddings, used at both ends) stays gathered.
"""

from __future__ import annotations

from zofftk.baselines import gpu_adam
from zofftk.baselines.machine import Machine
from zofftk.baselines.schedule import Schedule
from zofftk.baselines.workload import Workload
from zofftk.device.base import Event
from zofftk.virtual.events import ParamId, Part

GATHERED = "16-bit parameters of two layers"


class ZeRO3(Schedule):
    name = "ZeRO-3"

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload)
        self._numel = self.shard(self.num_params)
        machine.hold("16-bit parameters of the shard", "device", 2 * self._numel)
        machine.hold("16-bit gradients of the shard", "device", 2 * self._numel)
        machine.hold("fp32 parameters and moments of the shard", "device", gpu_adam.STATES_BYTES * self._numel)
        machine.hold("16-bit parameters in no layer", "device", 2 * workload.params_of(-1))
        self._arrived: dict[int, Event] = {}
        self._scattered: Event | None = None
        self._waiting = 0  # elements of the layer's gradients

    def enter(self, part: Part) -> None:
        if part.layer < 0:
            return
        following = part.layer + (1 if part.name == "forward" else -1)
        for layer in (part.layer, following):
            if 0 <= layer < self.workload.config.layers:
                self._gather(layer)
        self.machine.compute_waits(self._arrived[part.layer])

    def _gather(self, layer: int) -> None:
        if layer in self._arrived:
            return
        machine, shard = self.machine, self.shard(self.workload.params_of(layer))
        machine.line.change(GATHERED, 2 * shard * self.ranks)
        self._arrived[layer] = before = machine.computed()  # its memory is that of a layer which is finished with
        if self.ranks > 1:
            whole = machine.buffer("layer", "device", 2 * shard * self.ranks)
            part = machine.buffer("part of it", "device", 2 * shard)
            self._arrived[layer] = machine.gather("all-gather of a layer", whole, part, [before])

    def leave(self, part: Part) -> None:
        if part.layer < 0:
            return
        if part.name == "backward":
            self._scatter()
        at_turn = part.name == "forward" and part.layer == self.workload.config.layers - 1
        if not at_turn:  # backward begins with the layer that forward ended with
            shard = self.shard(self.workload.params_of(part.layer))
            self.machine.line.change(GATHERED, -2 * shard * self.ranks)
            del self._arrived[part.layer]

    def gradient(self, param: ParamId, numel: int) -> None:
        self._waiting += numel

    def end_backward(self) -> None:
        self._scatter()

    def _scatter(self) -> None:
        numel, self._waiting = self._waiting, 0
        if numel and self.ranks > 1:
            machine, shard = self.machine, self.shard(numel)
            whole = machine.buffer("gradients", "device", 2 * shard * self.ranks)
            part = machine.buffer("part of them", "device", 2 * shard)
            self._scattered = machine.scatter("reduce-scatter", whole, part, [machine.computed()])

    def step(self) -> None:
        machine = self.machine
        machine.compute_waits(self._scattered)
        gpu_adam.update(machine, self._numel, self.shard(self.workload.largest_param))
        if self.ranks > 1:
            shard = self.shard(self.workload.params_of(-1))
            whole = machine.buffer("in no layer", "device", 2 * shard * self.ranks)
            part = machine.buffer("part of it", "device", 2 * shard)
            machine.compute_waits(machine.gather("all-gather", whole, part, [machine.computed()]))
