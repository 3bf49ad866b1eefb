"""What a system does around the model's own work: the hooks that each of the systems here fills in."""

from __future__ import annotations

from zofftk.baselines.machine import ACTIVATIONS, GRADIENTS, Machine
from zofftk.baselines.workload import Workload
from zofftk.virtual.events import BlockId, Freed, Gradient, ParamId, Part, Spent, Taken


class Schedule:
    """One rank of `machine.durations.ranks` that train `workload`; what it holds is made when it is.

    Sizes are in bytes, `numel` in elements of this device's slice. `is_first` and `is_last` say which of a step's
    micro-batches is running.
    """

    name = ""
    states_bytes_per_param = 0  # of fp32 masters and moments, wherever they are

    def __init__(self, machine: Machine, workload: Workload) -> None:
        self.machine, self.workload = machine, workload
        self.ranks = machine.durations.ranks
        self.num_params = workload.num_params
        self.is_first = self.is_last = True
        self._sizes: dict[BlockId, int] = {}
        self._gradients = {
            event.block for _, events in workload.events() for event in events if isinstance(event, Gradient)
        }

    def shard(self, numel: int) -> int:
        """Elements of one rank's part, the last one padded."""
        return -(-numel // self.ranks)

    # -- hooks -------------------------------------------------------------------------------------------------

    def enter(self, part: Part) -> None:
        """Forward or backward of a layer begins, or what is before, between or after them."""

    def leave(self, part: Part) -> None:
        """It has ended."""

    def gradient(self, param: ParamId, numel: int) -> None:
        """Backward has finished it; its block is given back after this."""

    def end_backward(self) -> None:
        """Of one micro-batch."""

    def step(self) -> None:
        """All micro-batches have been run. Compute goes on with the next forward as soon as this lets it."""

    # -- the model's own work ----------------------------------------------------------------------------------

    def micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        self.is_first, self.is_last = is_first, is_last
        for part, events in self.workload.events():
            self.enter(part)
            for event in events:
                if isinstance(event, Spent):
                    self.machine.flops += event.flops
                    self.machine.device.compute(event.phase, event.ns)
                elif isinstance(event, Taken):
                    self._sizes[event.block] = event.nbytes
                    self.machine.line.change(self._what(event.block), event.nbytes)
                elif isinstance(event, Freed):
                    self.machine.line.change(self._what(event.block), -self._sizes.pop(event.block))
                elif isinstance(event, Gradient):
                    self.gradient(event.param, self.workload.numel[event.param])
            self.leave(part)
        self.end_backward()

    def _what(self, block: BlockId) -> str:
        return GRADIENTS if block in self._gradients else ACTIVATIONS


class Buckets:
    """Gradients in the order that backward makes them, in groups of at least so many elements."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.numel = 0

    def add(self, numel: int) -> int:
        """The elements of the bucket that this one has filled, or 0."""
        self.numel += numel
        return self.take() if self.numel >= self.least else 0

    def take(self) -> int:
        """What is left in the last one."""
        numel, self.numel = self.numel, 0
        return numel
