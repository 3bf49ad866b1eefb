"""How long each operation takes on a machine of a profile, in whole nanoseconds.

Whole numbers add up to the same sum in any order, so a dry run that is pieced together has the times of one in a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

from zofftk.device.base import DOWN, StreamName, Work
from zofftk.profile import Profile


@dataclass(frozen=True)
class Durations:
    """So many devices of the profile work at the same time: `ranks` times `slices`, as many to a host as it has.

    What several of them share has for each a part of what it has: they all do the same at the same time.

    Args:
        profile: the machine.
        ranks: train on different data.
        slices: devices that each layer is cut over (tensor parallelism); they are neighbours.
    """

    profile: Profile
    ranks: int = 1
    slices: int = 1

    @property
    def shares_cores(self) -> bool:
        """All streams of one device work on the same cores, so that one after the other is as quick as all at once."""
        return self.profile.gpu.is_host

    @property
    def ranks_here(self) -> int:
        """Devices on one host."""
        return min(self.ranks * self.slices, self.profile.interconnect.devices_per_host)

    @property
    def ranks_on_link(self) -> int:
        """Ranks that share a link: they are spread over the links of their host."""
        links = max(1, self.profile.interconnect.devices_per_host // self.profile.link.devices)
        return -(-self.ranks_here // links)

    def copy_ns(self, stream: StreamName, nbytes: int, copies: int) -> int:
        """Over the link, in so many pieces."""
        link = self.profile.link
        gb_s = link.down_gb_s if stream == DOWN else link.up_gb_s
        return round(copies * link.latency_us * 1e3 + nbytes * self.ranks_on_link / gb_s)

    def turns_ns(self, stream: StreamName, nbytes: int, owners: int) -> int:
        """Until all of `nbytes` are over, of which so many devices in a row have parts, and the others none."""
        link = self.profile.link
        gb_s = link.down_gb_s if stream == DOWN else link.up_gb_s
        links = -(-owners // self.ranks_on_link)
        return round(link.latency_us * 1e3 + nbytes / links / gb_s)

    def move_ns(self, nbytes: int) -> int:
        """An operation on the device that reads and writes so many bytes and does little else."""
        return round(self._move_ns(nbytes) + self.profile.gpu.kernel_us * 1e3)

    def _move_ns(self, nbytes: int) -> float:
        gpu = self.profile.gpu
        return nbytes / (gpu.memory_gb_s * gpu.memory_efficiency)

    def compute_ns(self, flops: int, elements: int, nbytes: int, *, wide: bool, is_attention: bool = False) -> int:
        """An operation on the device that does `flops` on so many elements, which it reads or writes.

        `wide`: on elements of 32 bits. `is_attention`: it is fused attention.
        """
        gpu = self.profile.gpu
        efficiency = gpu.max_efficiency
        if gpu.work_exponent and flops:
            efficiency = min(1.0, efficiency * (flops / 1e12) ** gpu.work_exponent)
        peak = (gpu.peak_32bit_tflops if wide else gpu.peak_16bit_tflops) * 1e3 * efficiency
        # flops / (peak * i / (i + half)), where i = flops / elements
        busy_ns = (flops + gpu.half_intensity * elements) / peak
        if is_attention and gpu.attention_tflops:
            busy_ns = flops / min(gpu.attention_tflops * 1e3, peak)
        return round(max(busy_ns, self._move_ns(nbytes)) + gpu.kernel_us * 1e3)

    def host_ns(self, work: Work) -> int:
        """A task of the update, or one that reads and writes memory."""
        host = self.profile.host
        busy_ns = work.updates * host.adam_ns_per_param if work.updates else work.nbytes / host.memory_gb_s
        return round(host.task_us * 1e3 + busy_ns * self.ranks_here)

    def collective_ns(self, nbytes: int, parts: int) -> int:
        """A ring over ranks with other data, `parts` of them, each of which ends or begins with `nbytes` in all."""
        between = self.profile.interconnect
        gb_s = between.inside_gb_s
        if self.ranks * self.slices > between.devices_per_host:
            rings = min(self.slices, between.devices_per_host)  # at the same time, one for each slice
            gb_s = min(gb_s, between.between_gb_s / rings)
        return self._ring_ns(nbytes, parts, gb_s)

    def slices_ns(self, nbytes: int) -> int:
        """A ring over the devices that a layer is cut over."""
        between = self.profile.interconnect
        gb_s = between.inside_gb_s
        if self.slices > between.devices_per_host:
            gb_s = min(gb_s, between.between_gb_s)
        return self._ring_ns(nbytes, self.slices, gb_s)

    def _ring_ns(self, nbytes: int, parts: int, gb_s: float) -> int:
        latency_ns = self.profile.interconnect.latency_us * 1e3
        return round((parts - 1) * latency_ns + nbytes * (parts - 1) / parts / gb_s)
