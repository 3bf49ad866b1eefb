"""Figures 8, 9 and 14 in small: our engine on an emulated V100, a number of times slower, beside its dry run.

Compute sleeps, links are timed, updates are real and timed: each operation does its work on small tensors and lasts
as long as the slow machine takes. The dry run has the same engine and the same durations, and no clock. Throughput is
that of the large model on the machine itself, by the formula 96·B·s·L·h².
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

import zofftk
from experiments.profiled_device import ProfiledDevice
from experiments.record import keep
from experiments.small_chain import Chain, offloaded_step, resident_step
from experiments.small_machine import BLOCKS, SLOWER, SmallModel, slowed, small_model
from experiments.throughput_cases import SYSTEMS, Case, all_cases, quick_cases
from experiments.verdict import verdict
from zofftk.device.base import COMPUTE
from zofftk.device.virtual import VirtualDevice
from zofftk.errors import InputError
from zofftk.presets import PRESETS
from zofftk.profile import Profile, load_profile
from zofftk.virtual.durations import Durations
from zofftk.whole_number import at_least_1

ALLOWED = 0.10
WARM_UP = 4  # steps of a dry run, after which all take as long
LEAST_S = 0.15  # of a sample: short steps are timed several at once


@dataclass(frozen=True)
class Prepared:
    case: Case
    model: SmallModel
    durations: Durations

    def tflops(self, step_s: float) -> float:
        """Of the large model, on the machine itself."""
        return self.model.tflop * self.case.micro_batches * self.model.scale / step_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=at_least_1, default=3, help="turns of all runs (default: 3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name has TEXT, such as fig9")
    parser.add_argument("--quick", action="store_true", help="the smallest batch of Figure 14 alone")
    parser.add_argument("--profile", default="v100-dgx2", help="the machine (default: v100-dgx2)")


def run(options: argparse.Namespace) -> int:
    profile = load_profile(options.profile)
    cases = [case for case in (quick_cases() if options.quick else all_cases()) if options.only in case.name]
    if not cases:
        raise InputError(f"--only: expected a part of a run's name, such as fig9, got {options.only}")
    with one_thread():
        prepared = [prepare(case, profile) for case in cases]
        predicted = {each.case.name: predict(each) for each in prepared}
        measured = measure_in_turns(prepared, predicted, options.repeats)
    samples = [describe(each, measured[each.case.name], predicted[each.case.name]) for each in prepared]
    results = compare(samples)
    show(samples)
    met = results["worst difference"] <= ALLOWED
    print(f"median difference {results['median difference']:.1%}, worst {results['worst difference']:.1%}")
    print(f"worst of the best turns {results['worst difference of the best turns']:.1%}")
    print(f"a step takes {results['median added, ms']:.1f} ms more than its dry run (median)")
    print("compute sleeps, links are timed, updates are real and timed; memory is not emulated")
    print(f"required: every step within {ALLOWED:.0%} of its dry run: {verdict(met)}")
    config = {"profile": asdict(profile), "slower": SLOWER, "blocks": BLOCKS, "repeats": options.repeats}
    print("record:", keep("throughput_small", config, samples, results))
    return 0 if met else 1


def prepare(case: Case, profile: Profile) -> Prepared:
    model = small_model(PRESETS[case.preset].model, case.micro_batch, profile)
    slow = slowed(profile, model.scale, adam_ns_per_param=SYSTEMS[case.system].adam_ns_per_param)
    return Prepared(case, model, Durations(slow))


def open_step(prepared: Prepared, device: ProfiledDevice | VirtualDevice, stack: ExitStack) -> Callable[[], None]:
    """A step of the run on `device`; `stack` closes what it uses."""
    case, system = prepared.case, SYSTEMS[prepared.case.system]
    chain = Chain(prepared.model, device)
    if system.options is None:
        stack.callback(device.close)
        return resident_step(chain, device, prepared.durations, case.micro_batches)
    bucket_bytes = 2 * prepared.model.block_numel
    opt = zofftk.OffloadAdamW(chain.parameters(), bucket_bytes=bucket_bytes, device=device, threads=1, **system.options)
    stack.callback(opt.close)
    return offloaded_step(chain, opt, case.micro_batches)


def predict(prepared: Prepared) -> float:
    """Seconds of a step by a dry run."""
    device = VirtualDevice(prepared.durations)
    with ExitStack() as stack:
        step = open_step(prepared, device, stack)
        for _ in range(WARM_UP):
            step()
        began_ns = device.now_ns(COMPUTE)
        step()
        return (device.now_ns(COMPUTE) - began_ns) / 1e9


def measure_in_turns(prepared: list[Prepared], predicted: dict[str, float], repeats: int) -> dict[str, list[float]]:
    """Seconds of a step, `repeats` samples of each run, all runs in turns; the first turn does not count."""
    samples: dict[str, list[float]] = {each.case.name: [] for each in prepared}
    with ExitStack() as stack:
        opened = []
        for each in prepared:
            device = ProfiledDevice(each.durations)
            opened.append((each, device, open_step(each, device, stack)))
        for turn in range(repeats + 1):
            for each, device, step in opened:
                name = each.case.name
                count = math.ceil(LEAST_S / predicted[name]) if turn else 1
                seconds = timed(device, step, count, warm_up=SYSTEMS[each.case.system].is_late)
                if turn:
                    samples[name].append(seconds)
    return samples


def timed(device: ProfiledDevice, step: Callable[[], None], count: int, *, warm_up: bool) -> float:
    """Seconds of one of so many steps in a row. `warm_up`: the first finds the host idle, those after it do not."""
    if warm_up:
        step()
    device.finish()
    began = time.perf_counter()
    for _ in range(count):
        step()
    device.finish()
    return (time.perf_counter() - began) / count


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's own threads spin on the cores that streams need."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def describe(prepared: Prepared, measured_s: list[float], predicted_s: float) -> dict[str, Any]:
    case, median_s = prepared.case, statistics.median(measured_s)
    return {
        "case": asdict(case) | {"name": case.name},
        "x": case.x,
        "model": asdict(prepared.model),
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "ratio": median_s / predicted_s,
        "best_ratio": min(measured_s) / predicted_s,
        "added_ms": 1e3 * (median_s - predicted_s),
        "measured_tflops": prepared.tflops(median_s),
        "predicted_tflops": prepared.tflops(predicted_s),
    }


def compare(samples: list[dict[str, Any]]) -> dict[str, Any]:
    differences = [abs(sample["ratio"] - 1) for sample in samples]
    best = [abs(sample["best_ratio"] - 1) for sample in samples]
    return {
        "median difference": statistics.median(differences),
        "worst difference": max(differences),
        "median added, ms": statistics.median(sample["added_ms"] for sample in samples),
        "worst difference of the best turns": max(best),
        "rows": [row for sample in samples for row in rows_of(sample)],
    }


def rows_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """What a figure draws: two points, in the large model's TFLOPS on the machine itself."""
    x_name, x = sample["x"]
    shared = {"figure": sample["case"]["figure"], "system": sample["case"]["system"], "x_name": x_name, "x": x}
    return [
        {**shared, "value": sample[f"{source}_tflops"], "unit": "TFLOPS/GPU", "kind": kind}
        for source, kind in (("measured", "measured"), ("predicted", "simulated"))
    ]


def show(samples: list[dict[str, Any]]) -> None:
    print(f"{'':58}{'measured':>11}{'predicted':>12}{'ratio':>8}{'best':>8}{'TFLOPS':>9}")
    for sample in samples:
        measured_ms = 1e3 * statistics.median(sample["measured_s"])
        times = f"{measured_ms:8.1f} ms{1e3 * sample['predicted_s']:9.1f} ms{sample['ratio']:8.3f}"
        print(f"{sample['case']['name']:58}{times}{sample['best_ratio']:8.3f}{sample['measured_tflops']:9.1f}")
