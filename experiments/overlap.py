"""How much of a step's transfers and update is hidden, with compute, link and Adam at 4 : 1 : 1 on a timed device."""

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import zofftk
from experiments.record import keep
from experiments.timed_device import Pace, TimedDevice
from experiments.verdict import verdict

REQUIRED_RATIO = 1.05
LAYERS = 16
LAYER_NUMEL = 64 * 4096
FORWARD_SHARE = 1 / 3  # of compute; backward does twice the work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unit-ms", type=float, default=60.0, help="Adam, and each direction of the link (default: 60)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="turns of the three kinds of step (default: 7)")


def run(options: argparse.Namespace) -> int:
    unit_s = options.unit_ms / 1e3
    with ExitStack() as stack:
        sides = open_sides(unit_s, stack)
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(options.repeats + 1):
            for name, side in sides.items():
                # With the model handed over, what a step leaves behind shows in the next forward: two steps in a row.
                side.step()
                seconds = side.step()
                if repeat:
                    samples[name].append(seconds)
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


class Side:
    """A chain of layers on a pace of its own, and how it is stepped."""

    def __init__(self, compute_s: float, make_optimizer: Any = None, *, hand_over: bool = False) -> None:
        self.pace = Pace()
        forward_s = compute_s * FORWARD_SHARE / LAYERS
        backward_s = compute_s * (1 - FORWARD_SHARE) / LAYERS
        self.model = nn.Sequential(*(PacedLayer(self.pace, forward_s, backward_s) for _ in range(LAYERS)))
        self.optimizer = make_optimizer(self.model) if make_optimizer else None
        if hand_over:
            assert self.optimizer is not None
            zofftk.offload(self.model, self.optimizer)

    def step(self) -> float:
        began = time.perf_counter()
        self.pace.start()
        self.model(torch.zeros(1, requires_grad=True)).backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()
        return time.perf_counter() - began


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


class PacedLayer(nn.Module):
    """A layer whose forward and backward take as long as they are told, and whose gradient has real elements."""

    def __init__(self, pace: Pace, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(LAYER_NUMEL, dtype=torch.bfloat16))
        self.pace, self.forward_s, self.backward_s = pace, forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Paced.apply(x, self.weight, self)


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: PacedLayer) -> torch.Tensor:
        ctx.layer = layer
        layer.pace.finish_after(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        layer = ctx.layer
        weight_grad = torch.full_like(layer.weight, 1e-3)
        layer.pace.finish_after(layer.backward_s)
        return grad, weight_grad, None
