"""ZeRO-Offload as it was released in September 2020, with the bytes that its code moves and keeps.

ZeRO-2's buckets; this rank's part of each is cast to fp32 on the GPU and copied into a page-locked fp32 gradient: 4
bytes a parameter down. With several micro-batches a step, the 16-bit sum so far comes up, is added to, and goes down
again: 2 up and 2 down for each but the first and the last. After backward, a pass on the host applies the clip
coefficient and the loss scale, then Adam runs tile by tile; each tile's fp32 parameters go up, 4 bytes, from one of two
page-locked tiles while the next is computed, and are cast on the GPU. The host has 16 bytes a parameter and the tiles.

With `delayed`, the paper's one-step delay: the host updates during the next forward and backward; gradients go down,
and parameters up, after that (its Fig. 6). `TorchCPU` updates with torch's Adam on the CPU and copies at the end.
"""

from __future__ import annotations

from zofftk.baselines import gpu_adam
from zofftk.baselines.host_sums import SummingOnHost
from zofftk.baselines.machine import COMPUTE, DOWN, UP, Machine
from zofftk.baselines.workload import Workload
from zofftk.device.base import Buffer, Event
from zofftk.virtual.events import ParamId

TILE_NUMEL = 1024**3  # of the release: 4 GiB of fp32
NUM_TILES = 2
WIDE = "fp32 copy of gradients on their way"


class ZeroOffload2020(SummingOnHost):
    name = "ZeRO-Offload (2020)"
    tile_numel = TILE_NUMEL

    def __init__(self, machine: Machine, workload: Workload, *, delayed: bool = False) -> None:
        super().__init__(machine, workload)
        self.delayed = delayed
        self._numel = self.shard(self.num_params)
        self._params = machine.hold("16-bit parameters", "device", 2 * self._numel * self.ranks)
        self._own_gradients = machine.hold("fp32 gradients of the shard", "host", 4 * self._numel)
        self._sums = machine.hold("16-bit sums of the shard", "host", 2 * self._numel)
        self._states = machine.hold("fp32 parameters and moments of the shard", "host", 12 * self._numel)
        self._tiles = [machine.hold("fp32 tiles on their way", "host", 4 * self.tile_numel) for _ in range(NUM_TILES)]
        self._updated: Event | None = None  # of a delayed step: its values have not gone up yet

    # -- during backward ---------------------------------------------------------------------------------------

    def gradient(self, param: ParamId, numel: int) -> None:
        if self.is_last:
            self.machine.move("norm and check", 2 * numel)
        super().gradient(param, numel)

    def send_sum(self, numel: int) -> Event:
        machine = self.machine
        wide = machine.buffer("fp32 gradients", "device", 4 * numel)
        machine.line.change(WIDE, 4 * numel)
        machine.move("gradients to fp32", gpu_adam.WIDEN_BYTES * numel)
        after = [machine.computed(), self._updated]  # the last update reads what is overwritten
        arrived = self.to_owners(DOWN, "gradients down", self._own_gradients, wide, after, numel)
        machine.line.change(WIDE, -4 * numel)
        return arrived

    # -- the update --------------------------------------------------------------------------------------------

    def step(self) -> None:
        if self.delayed:
            self._send_up([self._updated] if self._updated else [])
            self._updated = self._update(self._down)
            return
        scaled = self.machine.on_host("scale", self._own_gradients, [self._down])
        self._tile_by_tile(scaled)
        self._share()

    def _update(self, after: Event | None) -> Event:
        scaled = self.machine.on_host("scale", self._own_gradients, [after])
        return self.machine.on_host("Adam", self._own_gradients, [scaled], updates=self._numel)

    def _tile_by_tile(self, scaled: Event) -> None:
        sent: list[Event] = []
        for number, start in enumerate(range(0, self._numel, self.tile_numel)):
            numel = min(self.tile_numel, self._numel - start)
            tile = self._tiles[number % NUM_TILES].part(0, 4 * numel)
            free = sent[-NUM_TILES] if len(sent) >= NUM_TILES else None
            updated = self.machine.on_host("Adam", tile, [scaled, free], updates=numel)
            sent.append(self._copy_up(tile, numel, updated))
        self.machine.compute_waits(*sent)
        self.machine.move("parameters to 16 bits", gpu_adam.NARROW_BYTES * self._numel)

    def _copy_up(self, tile: Buffer, numel: int, after: Event) -> Event:
        """The kernel that narrows reads the tile over the link: nothing of it is on the GPU in fp32."""
        on_gpu = self.machine.buffer("tile", "device", 4 * numel)
        return self.machine.copy(UP, "parameters up", on_gpu, tile, [after])

    def _send_up(self, after: list[Event]) -> None:
        """All of the shard at once, after an update that was late."""
        if after:
            on_gpu = self.machine.buffer("parameters", "device", 4 * self._numel)
            on_host = self.machine.buffer("fp32 parameters", "host", 4 * self._numel)
            up = self.machine.copy(UP, "parameters up", on_gpu, on_host, [*after, self.machine.computed()])
            self.machine.compute_waits(up)
            self.machine.move("parameters to 16 bits", gpu_adam.NARROW_BYTES * self._numel)
            self._share()

    def _share(self) -> None:
        if self.ranks > 1:
            shard = self._params.part(0, 2 * self._numel)
            done = self.machine.gather("all-gather", self._params, shard, [self.machine.computed()])
            self.machine.compute_waits(done)


class TorchCPU(ZeroOffload2020):
    """With torch's Adam instead of the release's own, at the speed of the profile that it is given."""

    name = "Offload + PT-CPU Adam"

    def step(self) -> None:
        self._send_up([self._update(self._down)])


__all__ = ["COMPUTE", "TorchCPU", "ZeroOffload2020"]
