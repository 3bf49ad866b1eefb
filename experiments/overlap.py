"""How much of a step's transfers and update is hidden, with compute, link and Adam at 4 : 1 : 1 on a timed device."""

import argparse
import statistics
from contextlib import ExitStack

from torch import nn

import zofftk
from experiments.paced_model import LAYER_NUMEL, LAYERS, Side, time_in_turns
from experiments.record import keep
from experiments.timed_device import TimedDevice
from experiments.verdict import verdict

REQUIRED_RATIO = 1.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unit-ms", type=float, default=60.0, help="Adam, and each direction of the link (default: 60)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="turns of the three kinds of step (default: 7)")


def run(options: argparse.Namespace) -> int:
    unit_s = options.unit_ms / 1e3
    with ExitStack() as stack:
        sides = open_sides(unit_s, stack)
        samples = time_in_turns(sides, options.repeats, steps=2)  # handed over, the next forward shows what is left
    results = compare(samples, unit_s)
    for name, value in results.items():
        print(f"{name:40}{value:9.3f}")
    met = results["synchronous over its bound"] <= REQUIRED_RATIO
    print("Adam is timed, compute sleeps, links are timed")
    print(f"required: synchronous over its bound at most {REQUIRED_RATIO}: {verdict(met)}")
    print("record:", keep("overlap", {"unit_ms": options.unit_ms, "layers": LAYERS}, samples, results))
    return 0 if met else 1


def compare(samples: dict[str, list[float]], unit_s: float) -> dict[str, float]:
    median = {name: statistics.median(seconds) for name, seconds in samples.items()}
    # What no schedule can hide when the update starts after backward: the last bucket down, Adam, the last bucket up.
    bound_s = median["compute alone"] + unit_s / LAYERS + unit_s + unit_s / LAYERS
    return {
        **{f"{name}, ms": 1e3 * seconds for name, seconds in median.items()},
        "bound of the synchronous step, ms": 1e3 * bound_s,
        "synchronous over its bound": median["synchronous"] / bound_s,
        "handed over, over compute alone": median["handed over"] / median["compute alone"],
    }


def open_sides(unit_s: float, stack: ExitStack) -> dict[str, Side]:
    """The three kinds of step; `stack` closes their optimizers."""
    numel = LAYERS * LAYER_NUMEL
    gb_s = 2 * numel / unit_s / 1e9

    def optimizer(model: nn.Module) -> zofftk.OffloadAdamW:
        device = TimedDevice(down_gb_s=gb_s, up_gb_s=gb_s, adam_params_per_s=numel / unit_s)
        opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=2 * LAYER_NUMEL, device=device)
        stack.callback(opt.close)
        return opt

    return {
        "compute alone": Side(4 * unit_s),
        "synchronous": Side(4 * unit_s, optimizer),
        "handed over": Side(4 * unit_s, optimizer, hand_over=True),
    }
