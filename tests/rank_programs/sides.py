"""The two sides of a program: this rank's share of it, and one rank that gets the mean gradients."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

import zofftk
from tests.rank_programs.data import block_gradient
from tests.rank_programs.draw import BlockSpec, Program
from zofftk.device.emulated import EmulatedDevice


class Block(nn.Module):
    def __init__(self, spec: BlockSpec, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.times = weight, 2 if spec.kind == "twice" else 1

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        """Whose gradient is `times` the factors, whatever the weight."""
        return sum((self.weight * factors.to(self.weight.dtype)).sum().float() for _ in range(self.times))


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        generator, weights = torch.Generator().manual_seed(program.seed), []
        for spec in program.blocks:
            values = torch.randn(spec.numel, generator=generator).to(spec.dtype)
            weights.append(weights[-1] if spec.kind == "tied" else nn.Parameter(values, not spec.frozen))
        self.blocks = nn.ModuleList(Block(*both) for both in zip(program.blocks, weights, strict=True))

    def forward(self, factors: dict[int, torch.Tensor]) -> torch.Tensor:
        return sum(self.blocks[number](values) for number, values in factors.items())


class Side:
    """A model and its optimizer, on the ranks of a group."""

    def __init__(self, program: Program, position: dict[str, Any], group: Any, *, seed: int | None, **options: Any):
        """`position`: how far the program has come; see `run.Runner`."""
        self.program = program
        self.model = Model(program)
        self.params = list(dict.fromkeys(block.weight for block in self.model.blocks))
        groups = [
            {"params": [self.params[i] for i in indices], **hyper} for hyper, indices in position["groups"] if indices
        ]
        scale = program.options["loss_scale"]
        merged = {
            **program.options,
            "loss_scale": zofftk.LossScale(initial=8.0, growth_interval=2) if scale == "adapts" else scale,
            **position["update"],
            **options,
        }
        for param, is_trained in zip(self.params, position["trained"], strict=True):
            param.requires_grad_(is_trained)
        device = EmulatedDevice(poison=True, delays=seed, max_delay_ms=0.2)
        self.opt = zofftk.OffloadAdamW(groups, device=device, process_group=group, threads=1, **merged)

    def backward(self, gradients: dict[int, torch.Tensor], order: int = 0) -> None:
        """Of blocks, of which those that are frozen get none."""
        numbers = [n for n in gradients if self.model.blocks[n].weight.requires_grad]
        random.Random(order).shuffle(numbers)
        if numbers:
            loss = self.model({n: gradients[n] / self.model.blocks[n].times for n in numbers})
            # A factor of the loss, as `scale_loss` gives it, without its look for what was unfrozen.
            (loss * self.opt.loss_scale).backward()

    def evaluate(self) -> list[float]:
        with torch.no_grad():
            return [block(torch.ones(block.weight.shape)).item() for block in self.model.blocks]


def merged_gradients(
    program: Program, args: dict[str, Any], size: int, used: list[list[list[int]]], bad: Any
) -> dict[int, torch.Tensor]:
    """The means over ranks, by block."""
    merged: dict[int, torch.Tensor] = {}
    for rank, micros in enumerate(used):
        for micro, blocks in enumerate(micros):
            for block in blocks:
                gradient = gradient_of(program, args, size, (rank, micro, block), bad) / size
                merged[block] = merged[block] + gradient if block in merged else gradient
    return merged


def gradient_of(
    program: Program, args: dict[str, Any], size: int, place: tuple[int, int, int], bad: Any
) -> torch.Tensor:
    gradient = block_gradient(program, args, size, *place)
    if place == bad and gradient.numel():
        gradient[0] = float("inf")
    return gradient
