"""What a training step runs between two updates: one micro-batch, forward and backward, in virtual time.

There are two: a model whose every operation runs on fake tensors, and a replay of what such a run has recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from zofftk.optimizer import OffloadOptimizer
from zofftk.overlap import offload
from zofftk.ranks.slices import local_of
from zofftk.virtual.device_memory import Storages
from zofftk.virtual.durations import Durations
from zofftk.virtual.model_ops import ModelOps

Loss = Callable[[nn.Module], torch.Tensor]
Spend = Callable[[str, int, int], None]  # forward or backward, flops, nanoseconds

FORWARD, BACKWARD = "forward", "backward"


class Program(Protocol):
    """`params` are all trainable ones, by name."""

    @property
    def params(self) -> Mapping[str, torch.Tensor]: ...

    def micro_batch(self) -> None:
        """Forward and backward once."""
        ...

    def overlap(self, optimizer: OffloadOptimizer) -> None:
        """From now on its updates hide behind forward."""
        ...


class ModelProgram:
    """A model on fake tensors.

    Args:
        model: with fake parameters.
        loss: makes a fake batch, calls the model, and returns what backward begins at.
        fake: the mode of the model's tensors.
        storages: where the model's tensors are counted, but for its parameters and buffers.
        durations, spend: what operations take, and who is told.
        reads: is told of every tensor that an operation reads.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        fake: FakeTensorMode,
        storages: Storages,
        durations: Durations,
        spend: Spend,
        reads: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.model, self._loss = model, loss
        self.params = trainable(model)
        self._storages = storages
        self._phase = FORWARD
        for tensor in [*model.parameters(), *model.buffers()]:
            storages.leave_out(local_of(tensor))
        self._hooks = [param.register_hook(self._mark) for param in self.params.values()]
        self._ops = ModelOps(fake, storages, durations, lambda flops, ns: spend(self._phase, flops, ns), reads)

    def _mark(self, grad: torch.Tensor) -> None:
        """It is a gradient, and no activation."""
        if (block := self._storages.block_of(local_of(grad))) is not None:
            self._storages.memory.mark_gradient(block)

    def overlap(self, optimizer: OffloadOptimizer) -> None:
        offload(self.model, optimizer)

    def micro_batch(self) -> None:
        with self._ops:
            self._phase = FORWARD
            loss = self._loss(self.model)
            self._phase = BACKWARD
            loss.backward()
            del loss

    def end(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def leaves(values: Any) -> Sequence[torch.Tensor]:
    """The tensors in what a module takes or returns."""
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
