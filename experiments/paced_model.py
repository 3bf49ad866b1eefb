"""A chain of layers whose compute takes as long as it is told, for experiments on a timed device."""

import time
from typing import Any

import torch
from torch import nn

import zofftk
from experiments.timed_device import Pace

LAYERS = 16
LAYER_NUMEL = 64 * 4096
FORWARD_SHARE = 1 / 3  # of compute; backward does twice the work


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


def time_in_turns(sides: dict[str, Side], repeats: int, steps: int) -> dict[str, list[float]]:
    """Seconds of the last of `steps` steps in a row of each side, in turns; what a step leaves to the next shows there.

    The first turn does not count.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            seconds = [side.step() for _ in range(steps)][-1]
            if turn:
                samples[name].append(seconds)
    return samples


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
