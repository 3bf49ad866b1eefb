"""What a step of a system takes: its time, what it keeps where, and what crosses each link."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zofftk.baselines.ddp import DDP
from zofftk.baselines.deepspeed import DeepSpeed
from zofftk.baselines.l2l import L2L
from zofftk.baselines.machine import Machine
from zofftk.baselines.megatron import Megatron
from zofftk.baselines.own_engine import run_own_engine
from zofftk.baselines.schedule import Schedule
from zofftk.baselines.swap_advisor import SwapAdvisor
from zofftk.baselines.workload import Workload, record_workload
from zofftk.baselines.zero2 import ZeRO2
from zofftk.baselines.zero3 import ZeRO3
from zofftk.baselines.zero_offload_2020 import TorchCPU, ZeroOffload2020
from zofftk.device.base import COMPUTE
from zofftk.gpt_config import GPTConfig
from zofftk.profile import Profile
from zofftk.virtual.counts import Counts
from zofftk.virtual.durations import Durations

GIB = 1 << 30
OWN = "zofftk"
TORCH_CPU_ADAM_NS = 1.43  # the mean of the paper's Table 4, PT-CPU
SYSTEMS: dict[str, type[Schedule]] = {
    "ddp": DDP,
    "megatron": Megatron,
    "zero2": ZeRO2,
    "zero3": ZeRO3,
    "l2l": L2L,
    "swapadvisor": SwapAdvisor,
    "zero-offload-2020": ZeroOffload2020,
    "offload-torch-cpu": TorchCPU,
    "deepspeed": DeepSpeed,
}
ON_ONE_DEVICE = {"l2l", "swapadvisor"}  # whatever there is
NO_SLICES = {"ddp", "zero2", "zero3", *ON_ONE_DEVICE}
FEW = 2  # micro-batches of a step, after which one more takes as long as the last
WARM_UP = 2  # steps


@dataclass(frozen=True)
class Prediction:
    """One step of one of `ranks` x `slices` devices, in the pace that steps settle into.

    Bytes are of this device: what is on it when most is, and its part of the host, by name.
    """

    system: str
    config: GPTConfig
    profile: Profile
    ranks: int
    slices: int
    micro_batch: int
    micro_batches: int
    step: Counts
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]

    @property
    def step_ms(self) -> float:
        return self.step.ns / 1e6

    @property
    def tflops(self) -> float:
        """Of one device, by the formula 96·B·s·L·h² that counts recomputation, and neither attention nor the head."""
        config = self.config
        flops = 96 * self.micro_batch * self.micro_batches * config.seq * config.layers * config.hidden**2
        return flops / self.slices / self.step.ns / 1e3

    @property
    def link_bytes(self) -> tuple[int, int]:
        """Down to the host and up from it."""
        return self.step.bytes_down, self.step.bytes_up

    @property
    def device_lacks(self) -> int:
        """Bytes that are wanted on the device beyond what it has; below 0: that are left."""
        return sum(self.device_bytes.values()) - round(self.profile.gpu.memory_gib * GIB)

    @property
    def host_lacks(self) -> int:
        """The same of the host, for all of its devices."""
        here = Durations(self.profile, self.ranks, self.slices).ranks_here
        return sum(self.host_bytes.values()) * here - round(self.profile.host.memory_gib * GIB)

    @property
    def fits(self) -> bool:
        return self.device_lacks <= 0 and self.host_lacks <= 0


def predict(
    system: str,
    config: GPTConfig,
    profile: Profile,
    *,
    ranks: int = 1,
    slices: int = 1,
    micro_batch: int = 1,
    micro_batches: int = 1,
    only_time: bool = False,
    **options: Any,
) -> Prediction:
    """What a step of `system` takes on devices of `profile`; the model is `gpt_2020`'s in 16 bits, recomputed.

    Args:
        system: a key of `SYSTEMS`, or "zofftk" for our own engine.
        config: the whole model.
        profile: the machine.
        ranks: devices, or groups of slices, that train on different data.
        slices: devices that each layer is cut over.
        micro_batch: samples of one forward and backward.
        micro_batches: of a step, on each rank.
        only_time: quicker, but without the activations in `device_bytes`.
        **options: `delayed=True` of "zero-offload-2020"; those of the optimizer for "zofftk".

    Raises:
        ValueError: an unknown system, a number below 1, slices for a system that has none.
    """
    if system not in SYSTEMS and system != OWN:
        raise ValueError(f"system must be one of {', '.join([*SYSTEMS, OWN])}, got {system!r}")
    numbers = {"ranks": ranks, "slices": slices, "micro_batch": micro_batch, "micro_batches": micro_batches}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    if system in NO_SLICES and slices > 1:
        raise ValueError(f"{system} does not cut layers: slices must be 1, got {slices}")
    if system in ON_ONE_DEVICE:
        ranks = 1
    workload = record_workload(config, micro_batch, slices, profile)
    if only_time and system != OWN:
        workload = workload.without_memory()
    run = run_own_engine if system == OWN else _runner(SYSTEMS[system])
    timed = profile
    if system == "offload-torch-cpu":
        host = dataclasses.replace(profile.host, adam_ns_per_param=TORCH_CPU_ADAM_NS)
        timed = dataclasses.replace(profile, host=host)
    step, on_device, on_host = run(workload, Durations(timed, ranks, slices), micro_batches, **options)
    on_device["reserved"] = round(profile.gpu.reserved_gib * GIB)
    return Prediction(system, config, profile, ranks, slices, micro_batch, micro_batches, step, on_device, on_host)


Run = Callable[..., tuple[Counts, dict[str, int], dict[str, int]]]


def _runner(kind: type[Schedule]) -> Run:
    def run(workload: Workload, durations: Durations, micro_batches: int, **options: Any):
        machine = Machine(durations)
        schedule = kind(machine, workload, **options)
        few = min(micro_batches, FEW)
        for _ in range(WARM_UP):
            _step(schedule, machine, few)
        step = _step(schedule, machine, few)
        if micro_batches > few:
            another = _step(schedule, machine, few + 1).since(step)
            step = step.plus(another, micro_batches - few)
        return step, machine.peak_bytes, machine.host_bytes

    return run


def _step(schedule: Schedule, machine: Machine, micro_batches: int) -> Counts:
    before = _counts(machine)
    for number in range(micro_batches):
        schedule.micro_batch(is_first=number == 0, is_last=number == micro_batches - 1)
    schedule.step()
    return _counts(machine).since(before)


def _counts(machine: Machine) -> Counts:
    device = machine.device
    traffic = device.bytes_down, device.bytes_up, device.bytes_between
    return Counts(device.now_ns(COMPUTE), machine.flops, *traffic, device.busy_ns.copy())
