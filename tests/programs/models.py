"""Random small models: a line of blocks of equal width, each of its own kind and dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11
KINDS = ("linear", "wide", "tied", "reused", "embedding", "norm", "conv", "scalars")


@dataclass(frozen=True)
class BlockSpec:
    """`checkpoint`: None, or the value of `use_reentrant`."""

    kind: str
    dtype: torch.dtype = torch.float32
    checkpoint: bool | None = None
    optional: bool = False  # left out of some forwards
    again: bool = False  # called a second time at the end of the model

    def __str__(self) -> str:
        said = [self.kind, str(self.dtype).removeprefix("torch.")]
        if self.checkpoint is not None:
            said.append("re-entrant checkpoint" if self.checkpoint else "checkpoint")
        return " ".join(said + [name for name in ("optional", "again") if getattr(self, name)])


class RandomModel(nn.Module):
    """Adds up what its blocks make of the running value. fp32 between blocks."""

    def __init__(self, specs: list[BlockSpec], width: int) -> None:
        super().__init__()
        self.specs = specs
        self.blocks = nn.ModuleList(Block(spec, width).to(spec.dtype) for spec in specs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                module.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, skip: int, breaks: int = -1) -> torch.Tensor:
        """Bit i of `skip` leaves block i out, if it is optional. Backward raises before block `breaks`."""
        order = list(range(len(self.specs)))
        for i in order + [i for i in order if self.specs[i].again]:
            spec, block = self.specs[i], self.blocks[i]
            if i == breaks:
                x = Breaks.apply(x)
            if spec.optional and skip >> i & 1:
                continue
            if spec.checkpoint is None or not torch.is_grad_enabled():
                x = x + block(x, ids)
            else:
                x = x + checkpoint(block, x, ids, use_reentrant=spec.checkpoint, preserve_rng_state=False)
        return x


class Block(nn.Module):
    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.kind, self.dtype = spec.kind, spec.dtype
        if self.kind in ("linear", "reused"):
            self.layer = nn.Linear(width, width, bias=spec.kind == "linear")
        elif self.kind == "wide":  # its weights span several blocks of the statistics
            self.up, self.down = nn.Linear(width, 700), nn.Linear(700, width, bias=False)
        elif self.kind == "tied":
            self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
            self.second.weight = self.first.weight
        elif self.kind == "embedding":
            self.table = nn.Embedding(VOCABULARY, width)
        elif self.kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif self.kind == "conv":
            self.conv = nn.Conv2d(2, 3, 3, padding=1)
        else:
            self.gain = nn.Parameter(torch.tensor(0.5))
            self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = x.to(self.dtype)
        if self.kind == "linear":
            x = self.layer(x)
        elif self.kind == "reused":
            x = self.layer(torch.tanh(self.layer(self.layer(x))))
        elif self.kind == "wide":
            x = self.down(functional.gelu(self.up(x)))
        elif self.kind == "tied":
            x = self.second(torch.tanh(self.first(x)))
        elif self.kind == "embedding":
            x = self.table(ids) + x
        elif self.kind == "norm":
            x = self.norm(x)
        elif self.kind == "conv":
            x = self.conv(x[:, None, None, :].expand(-1, 2, 2, -1)).mean(dim=(1, 2))
        else:
            x = x * self.gain + self.empty.sum()
        return torch.tanh(x).float()


class Breaks(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("this backward breaks")


def losses_of(model: nn.Module, seed: int, width: int, skip: int = 0, breaks: int = -1) -> list[torch.Tensor]:
    """Two losses of one forward on the batch of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, width, generator=generator, requires_grad=True)  # so that re-entrant checkpoints have gradients
    ids = torch.randint(0, VOCABULARY, (3,), generator=generator)
    target = torch.randn(3, width, generator=generator)
    out = model(x, ids, skip, breaks)
    return [out.square().mean(), (out * target).sum()]
