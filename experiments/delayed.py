"""What the delayed update saves where batches are small: compute, link and Adam at 4 : 1 : 3 on a timed device."""

import argparse
import statistics
from contextlib import ExitStack
from typing import Any

from torch import nn

import zofftk
from experiments.paced_model import LAYER_NUMEL, LAYERS, Side, time_in_turns
from experiments.record import keep
from experiments.timed_device import TimedDevice
from experiments.verdict import verdict

REQUIRED_RATIO = 1.05
COMPUTE, ADAM = 4, 3  # in units of the link, each direction of which takes one
SYNCHRONOUS, AT_STEP, HIDDEN, INSIDE = "synchronous", "delayed", "delayed, handed over", "delayed, inside backward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--unit-ms", type=float, default=60.0, help="each direction of the link (default: 60)")
    parser.add_argument("--repeats", type=int, default=7, help="turns of every kind of step (default: 7)")


def run(options: argparse.Namespace) -> int:
    unit_s = options.unit_ms / 1e3
    with ExitStack() as stack:
        sides = open_sides(unit_s, stack)
        samples = time_in_turns(sides, options.repeats, steps=3)  # the first finds the host idle
    results = compare(samples, unit_s)
    for name, value in results.items():
        print(f"{name:45}{value:9.3f}")
    print("Adam is timed, compute sleeps, links are timed")
    met = all(results[f"{name}, over its bound"] <= REQUIRED_RATIO for name in (AT_STEP, HIDDEN, INSIDE))
    print(f"required: each kind of delayed update at most {REQUIRED_RATIO} of its bound: {verdict(met)}")
    print("record:", keep("delayed", {"unit_ms": options.unit_ms, "layers": LAYERS}, samples, results))
    return 0 if met else 1


def compare(samples: dict[str, list[float]], unit_s: float) -> dict[str, float]:
    median = {name: statistics.median(seconds) for name, seconds in samples.items()}
    bucket_s, compute_s = unit_s / LAYERS, median["compute alone"]
    bounds_s = {
        # What no schedule can hide when the update starts after backward: the last bucket down, Adam, the last up.
        SYNCHRONOUS: compute_s + bucket_s + ADAM * unit_s + bucket_s,
        # All values up between two backwards, where the model's forward does not wait for them one by one.
        AT_STEP: max(compute_s, ADAM * unit_s) + bucket_s + unit_s,
        # The last bucket down, since clipping needs the whole norm; the first bucket up, since forward needs it.
        HIDDEN: max(compute_s, ADAM * unit_s) + 2 * bucket_s,
        # The same at the other end: the last bucket up follows its own gradient.
        INSIDE: max(compute_s, ADAM * unit_s) + 2 * bucket_s,
    }
    return {
        **{f"{name}, ms": 1e3 * seconds for name, seconds in median.items()},
        **{f"{name}, over its bound": median[name] / bound_s for name, bound_s in bounds_s.items()},
        **{f"{SYNCHRONOUS} over {name}": median[SYNCHRONOUS] / median[name] for name in (AT_STEP, HIDDEN, INSIDE)},
    }


def open_sides(unit_s: float, stack: ExitStack) -> dict[str, Side]:
    """The kinds of step; `stack` closes their optimizers."""
    numel = LAYERS * LAYER_NUMEL
    gb_s = 2 * numel / unit_s / 1e9

    def maker(**options: Any) -> Any:
        def optimizer(model: nn.Module) -> zofftk.OffloadAdamW:
            device = TimedDevice(down_gb_s=gb_s, up_gb_s=gb_s, adam_params_per_s=numel / (ADAM * unit_s))
            opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=2 * LAYER_NUMEL, device=device, **options)
            stack.callback(opt.close)
            return opt

        return optimizer

    late = {"update": "delayed", "delay_after": 0}
    compute_s = COMPUTE * unit_s
    return {
        "compute alone": Side(compute_s),
        SYNCHRONOUS: Side(compute_s, maker()),
        AT_STEP: Side(compute_s, maker(**late)),
        HIDDEN: Side(compute_s, maker(**late), hand_over=True),
        INSIDE: Side(compute_s, maker(**late, backwards_per_step=1)),
    }
