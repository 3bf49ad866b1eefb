"""The small model as a module, and a training step of it, on any device that can be told what compute takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from experiments.small_machine import BLOCKS, GPU_ADAM_BYTES, SmallModel
from zofftk.virtual.durations import Durations


class Computes(Protocol):
    """A device, as far as the model's own work goes."""

    def compute(self, label: str, duration_ns: int) -> None: ...


class Chain(nn.Module):
    """Its layers have real parameters and gradients, and the times of a `SmallModel`."""

    def __init__(self, model: SmallModel, device: Computes) -> None:
        super().__init__()
        blocks = (_Layer(device, model.block_numel, *model.block_ns) for _ in range(BLOCKS))
        self.layers = nn.Sequential(_Layer(device, model.embedding_numel, *model.embedding_ns), *blocks)
        self._device, self._head_ns = device, model.head_ns

    def micro_batch(self) -> None:
        hidden = self.layers(torch.zeros(1, requires_grad=True))
        self._device.compute("head", self._head_ns)
        hidden.backward()


class _Layer(nn.Module):
    def __init__(self, device: Computes, numel: int, forward_ns: int, backward_ns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
        self.device, self.forward_ns, self.backward_ns = device, forward_ns, backward_ns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Paced.apply(x, self.weight, self)  # type: ignore[return-value]


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: _Layer) -> torch.Tensor:
        ctx.layer = layer
        layer.device.compute("forward", layer.forward_ns)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        layer = ctx.layer
        weight_grad = torch.full_like(layer.weight, 1e-3)
        layer.device.compute("backward", layer.backward_ns)
        return grad, weight_grad, None


def offloaded_step(chain: Chain, optimizer: torch.optim.Optimizer, micro_batches: int) -> Callable[[], None]:
    def step() -> None:
        for _ in range(micro_batches):
            chain.micro_batch()
        optimizer.step()
        optimizer.zero_grad()

    return step


def resident_step(chain: Chain, device: Computes, durations: Durations, micro_batches: int) -> Callable[[], None]:
    """With all states on the device and the update there: torch's, for as long as the device's memory takes."""
    numel = sum(param.numel() for param in chain.parameters())
    optimizer = torch.optim.AdamW(chain.parameters(), fused=True)

    def step() -> None:
        for number in range(micro_batches):
            chain.micro_batch()
            if number:
                device.compute("add to the gradients", durations.move_ns(6 * numel))
        optimizer.step()
        optimizer.zero_grad()
        device.compute("Adam", durations.move_ns(GPU_ADAM_BYTES * numel))

    return step
