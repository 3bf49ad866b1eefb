"""Table 2: the paper's machine, the profile that stands for it in simulations, and this machine, measured."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.record import keep
from experiments.rows import row
from zofftk.measure import measure_profile
from zofftk.plan.assumed import assumed_numbers
from zofftk.profile import Profile, load_profile, profile_path
from zofftk.run_record import hardware

PAPERS, HERE = "DGX-2 node", "this machine"
PROFILE = "v100-dgx2"
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
KIB = 1 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""


def run(options: argparse.Namespace) -> int:
    print("measuring this machine; this takes less than a minute")
    measured, found = measure_profile(), hardware()
    rows = [*of_profile(load_profile(PROFILE)), *of_this_machine(measured, found)]
    for each in rows:
        print(f"{each['system']:14}{each['x']:40}{each['value']:12.4g} {each['unit']}")
    results = {"rows": rows, "cpu": found["cpu"], "assumed": assumed_numbers(profile_path(PROFILE))}
    print("record:", keep("table2", {"profile": PROFILE}, {"measured": asdict(measured)}, results))
    return 0


def of_profile(profile: Profile) -> list[dict[str, Any]]:
    """Memory of a GPU in the unit of its makers, whose GB are GiB."""
    gpu, link, host = profile.gpu, profile.link, profile.host
    values = {
        ("GPUs", ""): profile.interconnect.devices_per_host,
        ("GPU memory", "GB"): gpu.memory_gib,
        ("CPU memory", "TB"): host.memory_gib * 2**30 / 1e12,
        ("PCIe, both directions", "GB/s"): link.down_gb_s + link.up_gb_s,
        ("16-bit matrix products, peak", "TFLOPS"): gpu.peak_16bit_tflops * gpu.max_efficiency,
        ("CPU memory bandwidth", "GB/s"): host.memory_gb_s,
        ("CPU Adam", "ns/param"): host.adam_ns_per_param,
    }
    return [row(PAPERS, "property", name, value, unit, "simulated") for (name, unit), value in values.items()]


def of_this_machine(measured: Profile, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The device is emulated where there is no GPU: its link is a copy within the memory."""
    values = {
        ("GPUs", ""): len(found["gpus"]),
        ("CPU cores", ""): found["cores"],
        ("CPU memory", "TB"): found["memory_bytes"] / 1e12,
        **caches(),
        ("16-bit matrix products, peak", "TFLOPS"): measured.gpu.peak_16bit_tflops,
        ("CPU memory bandwidth", "GB/s"): measured.host.memory_gb_s,
        ("CPU Adam", "ns/param"): measured.host.adam_ns_per_param,
        ("copy to the host", "GB/s"): measured.link.down_gb_s,
        ("copy to the device", "GB/s"): measured.link.up_gb_s,
    }
    return [row(HERE, "property", name, value, unit, "measured") for (name, unit), value in values.items()]


def caches() -> dict[tuple[str, str], float]:
    """As the system tells them; none where it does not."""
    sizes: dict[tuple[str, str], float] = {}
    for folder in sorted(CACHES.glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            in_kib = int(size.removesuffix("K"))
            sizes[f"CPU cache L{level}", "KB" if level == "1" else "MB"] = in_kib if level == "1" else in_kib / KIB
    return sizes
