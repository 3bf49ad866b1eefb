"""Table 4: latency of one Adam step on the CPU, ours beside torch's and DeepSpeed's, and the paper's.

Measured on as many of the first size's parameters as memory holds; all else is extrapolated by the time a parameter
takes, and marked. Who needs more memory in passing than there is runs on fewer. AdamW with weight decay; gradients and
the values that come out are 16-bit for ours, float32 for the others, which have no cast.
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch

from experiments.adam_sides import BUFFER_BYTES, BYTES, CASTS, OURS, OWN_BYTES, PLAIN, STREAM, Sides, open_sides
from experiments.record import keep
from experiments.rows import row
from zofftk.bench.cpu_adam import SPIN_S, environment
from zofftk.host_memory import available_memory
from zofftk.threads import usable_threads
from zofftk.whole_number import at_least_1

SIZES_B = (1, 2, 4, 8, 10)  # the paper's, billions of parameters
FULL_NUMEL, QUICK_NUMEL = 1_000_000_000, 16_000_000
TENSOR_NUMEL = 25_000_000  # of one parameter tensor; a layer of the paper's models has some of 4 to 67 million
SPARE_BYTES = 3 << 30  # left to the rest of the machine
PRINTED = {OURS: "CPU-Adam", PLAIN: "PT-CPU"}  # what the paper's columns are


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=at_least_1, default=3, help="timed turns (default: 3)")
    parser.add_argument("--numel", type=at_least_1, default=FULL_NUMEL, help=f"at most (default: {FULL_NUMEL:,})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_NUMEL:,} parameters, all sizes extrapolated")


def run(options: argparse.Namespace) -> int:
    threads, before = usable_threads(), torch.get_num_threads()
    torch.set_num_threads(threads)
    load_before, available = os.getloadavg()[0], available_memory()
    try:
        numel = largest_numel(BUFFER_BYTES, QUICK_NUMEL if options.quick else options.numel, available)
        samples, missing = measure(numel, threads, options.repeats, available)
    finally:
        torch.set_num_threads(before)
    results = compare(samples)
    show(results)
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")
    loads = [load_before, os.getloadavg()[0]]
    config = {"repeats": options.repeats, "threads": threads, "environment": environment(threads), "loads": loads}
    print("record:", keep("table4", config, samples, results | {"missing": missing}))
    return 0


def largest_numel(bytes_per_param: int, numel: int, available_bytes: int) -> int:
    """`numel`, or half as often as it takes."""
    while numel * bytes_per_param > available_bytes - SPARE_BYTES and numel > QUICK_NUMEL:
        numel //= 2
    return numel


def measure(
    numel: int, threads: int, repeats: int, available_bytes: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Seconds of every turn of every side, and on how many parameters it ran."""
    sides = open_sides(numel, TENSOR_NUMEL, threads)
    samples = {}
    fitting = [
        name
        for name in sides.steps
        if largest_numel(BUFFER_BYTES + OWN_BYTES.get(name, 0), numel, available_bytes) == numel
    ]
    for name, seconds in in_turns(sides, fitting, repeats).items():
        samples[name] = {"numel": numel, "seconds": seconds}
    missing, others = sides.missing, [name for name in sides.steps if name not in fitting]
    del sides  # before smaller ones are made
    for name in others:
        fewer = largest_numel(BUFFER_BYTES + OWN_BYTES[name], numel, available_bytes)
        small = open_sides(fewer, TENSOR_NUMEL, threads)
        samples[name] = {"numel": fewer, "seconds": in_turns(small, [name], repeats)[name]}
        del small
    return samples, missing


def in_turns(sides: Sides, names: list[str], repeats: int) -> dict[str, list[float]]:
    """The first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        sides.reset()
        for name in names:
            time.sleep(SPIN_S)
            began_s = time.perf_counter()
            sides.steps[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began_s)
    return seconds


def compare(samples: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Rows by size, and by side what it takes a parameter, of the bandwidth that the fastest loop reaches."""
    ns = {name: 1e9 * statistics.median(each["seconds"]) / each["numel"] for name, each in samples.items()}
    stream = min((name for name in ns if name.startswith(STREAM)), key=lambda name: ns[name])
    stream_gb_s = BYTES[STREAM] / ns[stream]
    sides, rows = [], []
    for name, each in samples.items():
        if name.startswith(STREAM) and name != stream:
            continue
        own = STREAM if name == stream else name
        gb_s = BYTES[own] / ns[name]
        side = {
            "side": own,
            "ns_per_param": ns[name],
            "bytes_per_param": BYTES[own],
            "gb_s": gb_s,
            "share_of_stream": gb_s / stream_gb_s,
            "measured_numel": each["numel"],
            "spread": (max(each["seconds"]) - min(each["seconds"])) / statistics.median(each["seconds"]),
        }
        sides.append(side)
        rows += [_latency(side, size) for size in SIZES_B]
    return {"rows": rows, "sides": sides, "stream_gb_s": stream_gb_s}


def _latency(side: dict[str, Any], size_b: int) -> dict[str, Any]:
    name: str = side["side"]
    system = PRINTED.get(name, name)
    seconds = side["ns_per_param"] * size_b
    is_measured = side["measured_numel"] == size_b * 1_000_000_000
    return row(system, "params", f"{size_b}B", seconds, "s", "measured", extrapolated=not is_measured)


def show(results: dict[str, Any]) -> None:
    sides = {side["side"]: side for side in results["sides"]}
    print(f"{'':24}{'ns/param':>10}{'B/param':>9}{'GB/s':>8}{'of stream':>11}{'spread':>8}  measured on")
    for name, side in sides.items():
        print(
            f"{name:24}{side['ns_per_param']:10.3f}{side['bytes_per_param']:9}{side['gb_s']:8.1f}"
            f"{side['share_of_stream']:11.0%}{side['spread']:8.0%}  {side['measured_numel']:,}"
        )
    for other in (PLAIN, CASTS):
        print(f"{other} over {OURS}: {sides[other]['ns_per_param'] / sides[OURS]['ns_per_param']:.2f}")
