"""Measures this machine in under a minute, and saves it as the profile `this` of dry runs.

The device is the one the engine would run on: the first CUDA device where there is one, else the CPU, whose memory the
emulated device copies within. Each number is the median of a few repetitions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console

from zofftk.config import OffloadConfig
from zofftk.cpu_adam import adamw_step
from zofftk.device.base import DOWN, HOST, UP, Buffer, Device, Run
from zofftk.device.opening import open_device
from zofftk.host_memory import usable_memory
from zofftk.profile import Gpu, Host, Interconnect, Link, Profile, this_path, write_profile

GIB = 1 << 30
BUDGET_S = 1.5  # for the repetitions of one number
FEWEST, MOST = 3, 50
ADAM_NUMEL = 16 * 1024 * 1024
COPY_BYTES = 128 * 1024 * 1024
SMALL_SIZES, LARGE_SIZES = (256, 512, 1024), (1024, 2048, 4096, 8192)  # of square matrices, on a CPU and on a GPU
CUDA_RESERVED_GIB = 1.0
NOTES = {
    "gpu.reserved_gib": "assumed: context, workspaces and fragments on a GPU; none on a CPU",
    "gpu.max_efficiency": "1: the peaks are what was reached",
    "gpu.memory_gb_s": "of a copy",
    "gpu.memory_efficiency": "what GELU reaches of it",
    "link.devices": "assumed",
    "interconnect.inside_gb_s": "assumed: as the link; it is not measured",
    "interconnect.between_gb_s": "assumed: 10 Gb/s Ethernet",
    "interconnect.latency_us": "assumed",
}


@dataclass(frozen=True)
class Product:
    """How long a product of square matrices took."""

    size: int
    seconds: float

    @property
    def flops(self) -> int:
        return 2 * self.size**3

    @property
    def elements(self) -> int:
        return 3 * self.size**2


def measure_this(console: Console) -> int:
    """For `zofftk doctor --measure`."""
    console.print("Measuring this machine; this takes less than a minute.")
    profile = measure_profile()
    source = f"Measured by zofftk doctor --measure on {time.strftime('%Y-%m-%d')}, but for what is said to be assumed."
    write_profile(profile, this_path(), source, NOTES)
    gpu, link, host = profile.gpu, profile.link, profile.host
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
    host_gb_s = _memory_gb_s(torch.device("cpu")) if is_cuda else gpu.memory_gb_s
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


# -- the device ----------------------------------------------------------------------------------------------------


def measure_device(place: torch.device) -> Gpu:
    is_cuda = place.type == "cuda"
    sizes = LARGE_SIZES if is_cuda else SMALL_SIZES
    half = torch.float16 if is_cuda and torch.cuda.get_device_capability(place) < (8, 0) else torch.bfloat16
    half_rate, half_intensity = fit_products([_product(size, half, place) for size in sizes])
    wide_rate, _ = fit_products([_product(size, torch.float32, place) for size in sizes])
    one = torch.zeros(1, device=place)
    memory_gb_s = _memory_gb_s(place)
    memory_bytes = torch.cuda.get_device_properties(place).total_memory if is_cuda else usable_memory()
    return Gpu(
        memory_gib=memory_bytes / GIB,
        reserved_gib=CUDA_RESERVED_GIB if is_cuda else 0.0,
        peak_16bit_tflops=half_rate / 1e12,
        peak_32bit_tflops=wide_rate / 1e12,
        max_efficiency=1.0,
        half_intensity=half_intensity,
        memory_gb_s=memory_gb_s,
        memory_efficiency=min(1.0, _elementwise_gb_s(half, place) / memory_gb_s),
        kernel_us=_seconds(lambda: one.add_(1.0), place, calls=100) * 1e6,
    )


def _product(size: int, dtype: torch.dtype, place: torch.device) -> Product:
    a = torch.ones(size, size, dtype=dtype, device=place)
    out = torch.empty_like(a)
    return Product(size, _seconds(lambda: torch.mm(a, a, out=out), place))


def fit_products(products: Sequence[Product]) -> tuple[float, float]:
    """Floating-point operations a second that ever larger products tend to, and the intensity of half of it.

    A product takes (flops + half_intensity * elements) / rate, as `Durations.compute_ns` has it, which is a straight
    line in elements/flops: the one through the largest product that fits the others best. Where smaller ones are no
    slower, half_intensity is 0.
    """
    largest = max(products, key=lambda product: product.size)
    x0, y0 = largest.elements / largest.flops, largest.seconds / largest.flops
    xs = np.array([product.elements / product.flops - x0 for product in products])
    ys = np.array([product.seconds / product.flops - y0 for product in products])
    slope = float(xs @ ys / (xs @ xs)) if len(products) > 1 else 0.0
    slope = min(max(slope, 0.0), 0.5 * y0 / x0)  # the largest reaches at least half of what it tends to
    rate = 1.0 / (y0 - slope * x0)
    return rate, slope * rate


def _memory_gb_s(place: torch.device) -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source), place) / 1e9


def _elementwise_gb_s(dtype: torch.dtype, place: torch.device) -> float:
    """What an operation of a model's reads and writes that is more than a copy; on a CPU its arithmetic counts."""
    source = torch.ones(COPY_BYTES // dtype.itemsize // 4, dtype=dtype, device=place)
    seconds = _seconds(lambda: torch.nn.functional.gelu(source, approximate="tanh"), place)
    return 2 * source.numel() * dtype.itemsize / seconds / 1e9


# -- link and host -------------------------------------------------------------------------------------------------


def measure_link(device: Device) -> Link:
    """Copies as the engine makes them, into and out of its own buffers."""
    slot = device.buffer("slot", COPY_BYTES, torch.uint8, "device", zero=True)
    wire = device.buffer("wire", COPY_BYTES, torch.uint8, "host", zero=True, on_link=True)
    seconds = {
        (stream, nbytes): _repeat(
            lambda stream=stream, nbytes=nbytes: _copy(device, slot, wire, stream == DOWN, nbytes)
        )
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

    return _repeat(run) * 1e6


def measure_adam_ns(numel: int = ADAM_NUMEL) -> float:
    """For one parameter with a 16-bit gradient, which takes the new 16-bit value."""
    master, exp_avg, exp_avg_sq = (torch.zeros(numel) for _ in range(3))
    grad = torch.full((numel,), 1e-3, dtype=torch.bfloat16)
    return _repeat(lambda: adamw_step(master, exp_avg, exp_avg_sq, grad, step=1, lr=0.0, out=grad)) / numel * 1e9


# -- time ----------------------------------------------------------------------------------------------------------


def _seconds(operation: Callable[[], object], place: torch.device, *, calls: int = 1) -> float:
    """Of one operation of torch, among so many that are enqueued at once."""

    def run() -> None:
        for _ in range(calls):
            operation()
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    return _repeat(run) / calls


def _repeat(run: Callable[[], None]) -> float:
    """Median seconds of a call, after one that is not counted."""
    run()
    seconds: list[float] = []
    while len(seconds) < FEWEST or (sum(seconds) < BUDGET_S and len(seconds) < MOST):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
