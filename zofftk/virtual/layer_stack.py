"""The layers of a model that repeat, and the model with only the first few of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class LayerStack:
    """`prefix` begins the names of what is in it, such as `blocks.`."""

    layers: nn.ModuleList
    prefix: str

    @contextmanager
    def first(self, number: int) -> Iterator[None]:
        """The model has only so many layers meanwhile."""
        all_of_them = self.layers._modules
        self.layers._modules = dict(list(all_of_them.items())[:number])
        try:
            yield
        finally:
            self.layers._modules = all_of_them


def find_layer_stack(model: nn.Module, least: int) -> LayerStack | None:
    """The list of at least so many modules that look alike which holds most of the model's parameters."""
    stacks = [
        LayerStack(module, f"{name}." if name else "")
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= least and len({_looks(one) for one in module}) == 1
    ]
    return max(stacks, key=lambda stack: sum(p.numel() for p in stack.layers.parameters()), default=None)


def _looks(module: nn.Module) -> tuple[object, ...]:
    def look(tensor: torch.Tensor) -> tuple[object, ...]:
        return tuple(tensor.shape), tensor.dtype, tensor.requires_grad

    return type(module), tuple((name, look(param)) for name, param in module.named_parameters())
