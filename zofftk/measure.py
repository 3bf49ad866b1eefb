"""Measures this machine in under a minute, and saves it as the profile `this` of dry runs.

The device is the one the engine would run on: the first CUDA device where there is one, else the CPU, whose memory the
emulated device copies within. Each number is the median of a few repetitions.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console

from zofftk.config import OffloadConfig
from zofftk.cpu_adam import adamw_step
from zofftk.device.base import DOWN, HOST, UP, Buffer, Device, Run
from zofftk.device.opening import open_device
from zofftk.host_memory import usable_memory
from zofftk.measure_device import COPY_BYTES, GIB, measure_device, measure_memory_gb_s
from zofftk.profile import Host, Interconnect, Link, Profile, this_path, write_profile
from zofftk.repeat import repeat

ADAM_NUMEL = 16 * 1024 * 1024
NOTES = {
    "gpu.max_efficiency": "1: the peaks are what was reached",
    "gpu.memory_gb_s": "of a copy",
    "gpu.memory_efficiency": "what a layer reaches of it beside its products",
    "gpu.attention_tflops": "what fused attention reaches; 0 would mean: as products",
    "link.devices": "assumed",
    "interconnect.inside_gb_s": "assumed: as the link; it is not measured",
    "interconnect.between_gb_s": "assumed: 10 Gb/s Ethernet",
    "interconnect.latency_us": "assumed",
}
RESERVED_NOTES = {False: "assumed: context, workspaces and fragments", True: "what a training of a tiny model takes"}


def measure_this(console: Console) -> int:
    """For `zofftk doctor --measure`."""
    console.print("Measuring this machine; this takes less than a minute.")
    profile = measure_profile()
    source = f"Measured by zofftk doctor --measure on {time.strftime('%Y-%m-%d')}, but for what is said to be assumed."
    gpu, link, host = profile.gpu, profile.link, profile.host
    notes = NOTES | {"gpu.reserved_gib": RESERVED_NOTES[gpu.is_host]}
    write_profile(profile, this_path(), source, notes)
    lines = [
        f"{profile.name}: 16-bit {gpu.peak_16bit_tflops:.3g} and 32-bit {gpu.peak_32bit_tflops:.3g} TFLOPS, "
        f"memory {gpu.memory_gib:.1f} GiB at {gpu.memory_gb_s:.3g} GB/s",
        f"link: {link.down_gb_s:.3g} GB/s down, {link.up_gb_s:.3g} GB/s up, {link.latency_us:.3g} us a copy",
        f"host: Adam {host.adam_ns_per_param:.3g} ns a parameter, memory {host.memory_gib:.1f} GiB at "
        f"{host.memory_gb_s:.3g} GB/s",
        f"Saved as the profile 'this': {this_path()}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0


def measure_profile() -> Profile:
    is_cuda = torch.cuda.is_available()
    place = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    device = open_device(place, OffloadConfig())
    try:
        link = measure_link(device)
        task_us = measure_task_us(device)
    finally:
        device.close()
    gpu = measure_device(place)
    host_gib = usable_memory() / GIB
    host_gb_s = measure_memory_gb_s(torch.device("cpu")) if is_cuda else gpu.memory_gb_s
    devices = torch.cuda.device_count() if is_cuda else 1
    return Profile(
        name=torch.cuda.get_device_name(0) if is_cuda else "this machine's CPU",
        gpu=gpu,
        link=link,
        host=Host(memory_gib=host_gib, memory_gb_s=host_gb_s, adam_ns_per_param=measure_adam_ns(), task_us=task_us),
        interconnect=Interconnect(
            devices_per_host=devices, inside_gb_s=link.down_gb_s, between_gb_s=1.0, latency_us=50.0
        ),
    )


# -- link and host -------------------------------------------------------------------------------------------------


def measure_link(device: Device) -> Link:
    """Copies as the engine makes them, into and out of its own buffers."""
    slot = device.buffer("slot", COPY_BYTES, torch.uint8, "device", zero=True)
    wire = device.buffer("wire", COPY_BYTES, torch.uint8, "host", zero=True, on_link=True)
    seconds = {
        (stream, nbytes): repeat(lambda stream=stream, nbytes=nbytes: _copy(device, slot, wire, stream == DOWN, nbytes))
        for stream in (DOWN, UP)
        for nbytes in (COPY_BYTES, 1)
    }
    latency_s = min(seconds[DOWN, 1], seconds[UP, 1])
    down_s, up_s = (max(seconds[stream, COPY_BYTES] - latency_s, 1e-9) for stream in (DOWN, UP))
    return Link(
        down_gb_s=COPY_BYTES / down_s / 1e9, up_gb_s=COPY_BYTES / up_s / 1e9, latency_us=latency_s * 1e6, devices=1
    )


def _copy(device: Device, slot: Buffer, wire: Buffer, is_down: bool, nbytes: int) -> None:
    if is_down:
        device.copy_down("down", wire, slot, [Run(0, nbytes)])
        device.synchronize(device.record(DOWN), "measured")
    else:
        device.copy_up("up", slot, wire, [Run(0, nbytes)])
        device.synchronize(device.record(UP), "measured")


def measure_task_us(device: Device) -> float:
    """Until a task on the host stream that does nothing is known to have ended."""

    def run() -> None:
        device.host_task("nothing", lambda: None)
        device.synchronize(device.record(HOST), "measured")

    return repeat(run) * 1e6


def measure_adam_ns(numel: int = ADAM_NUMEL) -> float:
    """For one parameter with a 16-bit gradient, which takes the new 16-bit value."""
    master, exp_avg, exp_avg_sq = (torch.zeros(numel) for _ in range(3))
    grad = torch.full((numel,), 1e-3, dtype=torch.bfloat16)
    return repeat(lambda: adamw_step(master, exp_avg, exp_avg_sq, grad, step=1, lr=0.0, out=grad)) / numel * 1e9
