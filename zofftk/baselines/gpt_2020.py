"""The model that all systems are compared on: GPT-2 as Megatron-LM had it in 2020, one device's slice of it.

Attention is not fused (scores, mask, softmax and dropout are tensors of batch x heads x seq x seq), every layer is
recomputed, and logits and loss are cut over the vocabulary. The loss takes 10 bytes a logit: 2 as computed, 4 in 32
bits, 4 for the softmax, which becomes the gradient (versions of that year take between 6 and 14). What lies between the
cut parts is whole on every device: sequence parallelism came later. A sum over the slices is one operation, which a dry
run times and nobody performs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zofftk.gpt_config import GPTConfig

DROPOUT = 0.1  # GPT-2's


class _SumBackward(torch.autograd.Function):
    """What every slice reads whole: each has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _sum_over_slices(grad)


class _SumForward(torch.autograd.Function):
    """What every slice has a part of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum_over_slices(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def _sum_over_slices(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.all_reduce(x, "sum", "slices")


class _CrossEntropy(torch.autograd.Function):
    """The mean over all tokens, of fp32 logits, which it overwrites: its gradient takes the softmax's place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits.sub_(logits.amax(-1, keepdim=True))
        predicted = logits.gather(-1, targets[:, None])
        softmax = logits.exp()
        sums = softmax.sum(-1, keepdim=True)
        softmax.div_(sums)
        ctx.save_for_backward(softmax, targets)
        return (sums.log() - predicted).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        softmax, targets = ctx.saved_tensors
        softmax.scatter_add_(-1, targets[:, None], -torch.ones_like(softmax[:, :1]))
        return softmax.mul_(grad / len(targets)), None


class _Sliced(nn.Module):
    def __init__(self, slices: int) -> None:
        super().__init__()
        self.slices = slices

    def read_whole(self, x: Tensor) -> Tensor:
        return x if self.slices == 1 else _SumBackward.apply(x)  # type: ignore[return-value]

    def whole(self, x: Tensor) -> Tensor:
        return x if self.slices == 1 else _SumForward.apply(x)  # type: ignore[return-value]


class Attention2020(_Sliced):
    def __init__(self, config: GPTConfig, slices: int) -> None:
        super().__init__(slices)
        self.heads, self.head_size = config.heads // slices, config.hidden // config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden // slices)
        self.out = nn.Linear(config.hidden // slices, config.hidden, bias=False)
        self.out_bias = nn.Parameter(torch.zeros(config.hidden))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(self.read_whole(x)).view(batch, seq, self.heads, 3 * self.head_size)
        query, key, value = qkv.permute(0, 2, 1, 3).chunk(3, dim=-1)
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_size)
        scores = scores.masked_fill(mask, -10000.0)
        mixed = torch.matmul(F.dropout(torch.softmax(scores, -1), DROPOUT), value)
        out = self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return self.whole(out) + self.out_bias


class MLP2020(_Sliced):
    def __init__(self, config: GPTConfig, slices: int) -> None:
        super().__init__(slices)
        self.up = nn.Linear(config.hidden, 4 * config.hidden // slices)
        self.out = nn.Linear(4 * config.hidden // slices, config.hidden, bias=False)
        self.out_bias = nn.Parameter(torch.zeros(config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        up = F.gelu(self.up(self.read_whole(x)), approximate="tanh")
        return self.whole(self.out(up)) + self.out_bias


class Block2020(nn.Module):
    def __init__(self, config: GPTConfig, slices: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.hidden)
        self.attention = Attention2020(config, slices)
        self.norm_mlp = nn.LayerNorm(config.hidden)
        self.mlp = MLP2020(config, slices)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm_attention(x), mask), DROPOUT)
        return x + F.dropout(self.mlp(self.norm_mlp(x)), DROPOUT)


class GPT2020(_Sliced):
    """Maps token ids and the next tokens to their mean cross-entropy.

    Args:
        config: its number of heads must be divisible by `slices`.
        slices: devices that each layer is cut over; the parameters are those of one of them.
    """

    def __init__(self, config: GPTConfig, slices: int = 1) -> None:
        super().__init__(slices)
        if config.heads % slices:
            raise ValueError(f"slices must divide the {config.heads} heads, got {slices}")
        self.config = config
        self.tokens = nn.Embedding(-(-config.vocab // slices), config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)
        self.blocks = nn.ModuleList(Block2020(config, slices) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        seq = ids.shape[1]
        mask = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        x = self.whole(self.tokens(ids)) + self.positions.weight[:seq]
        for block in self.blocks:
            # Without a state of the random generator, which a dry run has not.
            x: Tensor = checkpoint(block, x, mask, use_reentrant=False, preserve_rng_state=False)  # type: ignore
        logits = F.linear(self.read_whole(self.norm(x)), self.tokens.weight)
        # The exchange of each token's largest logit and sum is left out: 8 bytes a token.
        return _CrossEntropy.apply(logits.flatten(0, 1).float(), targets.flatten())  # type: ignore[return-value]
