"""What takes the bytes, on one device and on one host, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zofftk.ranks.slices import local_of
from zofftk.rules.base import Rule
from zofftk.virtual.dry_run import GIB, device_bytes, num_params
from zofftk.virtual.rehearsal import Rehearsal

PARAMETERS, ACTIVATIONS, GRADIENTS = "parameters", "activations", "gradients waiting for their bucket"
SLOTS, BETWEEN = "staging slots", "between ranks"
RESERVED = "CUDA context, workspaces, allocator slack"
MASTERS, LINK, LATE = "fp32 masters", "gradients, then new values (page-locked)", "late gradients (page-locked)"
ACCUMULATORS, STATISTICS, SAVING = "fp32 accumulators", "statistics", "largest tensor, while a checkpoint is saved"


@dataclass(frozen=True)
class MemoryList:
    """Bytes by what takes them, when most is taken; the items add up to `total_bytes`.

    `locked_bytes` is the page-locked part of a host's.
    """

    items: Mapping[str, int]
    capacity_bytes: int
    locked_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.items.values())

    @property
    def free_bytes(self) -> int:
        """Below 0: so much is missing."""
        return self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0


@dataclass(frozen=True)
class Memory:
    """Of one device, and of one host with all its devices."""

    device: MemoryList
    host: MemoryList
    num_params: int  # trained, of one device
    devices_in_host: int = 0  # whose memory is the host's own: a CPU that trains

    @property
    def host_total_bytes(self) -> int:
        """With what devices take of it."""
        return self.host.total_bytes + self.devices_in_host * self.device.total_bytes

    @property
    def host_free_bytes(self) -> int:
        return self.host.capacity_bytes - self.host_total_bytes

    @property
    def fits(self) -> bool:
        return self.device.fits and self.host_free_bytes >= 0

    @property
    def free_share(self) -> float:
        """Of what there is, on the device or the host, whichever has less left; below 0: so much is missing."""
        return min(self.device.free_bytes / self.device.capacity_bytes, self.host_free_bytes / self.host.capacity_bytes)


def memory_of(rehearsal: Rehearsal, rule: Rule, *, is_late: bool) -> Memory:
    """After a rehearsal has run its micro-batches."""
    durations = rehearsal.durations
    profile, ranks_here = durations.profile, durations.ranks_here
    host = {name: nbytes * ranks_here for name, nbytes in _host_items(rehearsal, rule, is_late=is_late).items()}
    return Memory(
        device=MemoryList(_device_items(rehearsal), round(profile.gpu.memory_gib * GIB)),
        host=MemoryList(host, round(profile.host.memory_gib * GIB), rehearsal.device.locked_bytes * ranks_here),
        num_params=num_params(rehearsal),
        devices_in_host=ranks_here if profile.gpu.is_host else 0,
    )


def _device_items(rehearsal: Rehearsal) -> dict[str, int]:
    found = device_bytes(rehearsal)
    slots = _named(rehearsal, "device", "staging slot")
    items = {
        PARAMETERS: found.parameters,
        ACTIVATIONS: found.activations,
        GRADIENTS: found.gradients,
        SLOTS: slots,
        BETWEEN: found.engine - slots,
        RESERVED: found.reserved,
    }
    return _without_zeros(items)


def _host_items(rehearsal: Rehearsal, rule: Rule, *, is_late: bool) -> dict[str, int]:
    """Of one rank."""
    wires = _named(rehearsal, "host", "wire ")
    late = wires // 2 if is_late else 0  # a second wire for every bucket
    items = {MASTERS: _named(rehearsal, "host", "master")}
    for state in rule.states:
        items[f"fp32 {state}"] = _named(rehearsal, "host", state, exact=True)
    statistics = _named(rehearsal, "host", "square_sums") + _named(rehearsal, "host", "norms", exact=True)
    items |= {LINK: wires - late, LATE: late, ACCUMULATORS: _named(rehearsal, "host", "total of ")}
    items[STATISTICS] = statistics
    items[BETWEEN] = rehearsal.device.allocated_bytes["host"] - sum(items.values())
    tensors = (local_of(param) for param in rehearsal.model.parameters())
    items[SAVING] = max((tensor.numel() * tensor.dtype.itemsize for tensor in tensors), default=0)
    return _without_zeros(items)


def _named(rehearsal: Rehearsal, place: str, name: str, *, exact: bool = False) -> int:
    """Of the buffers whose name is this, or begins with it."""
    named = rehearsal.device.named_bytes
    return sum(
        nbytes
        for (where, own), nbytes in named.items()
        if where == place and (own == name if exact else own.startswith(name))
    )


def _without_zeros(items: dict[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in items.items() if nbytes}
