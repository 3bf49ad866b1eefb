"""A GPT-2-like language model: pre-norm blocks, learned positions, output head tied to the token embedding."""

import math
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zofftk.gpt_config import GPTConfig

INIT_STD = 0.02


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        # Head by head, so that a range of its rows is whole heads: that is what tensor parallelism cuts.
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, -1, 3, hidden // self.heads)
        query, key, value = qkv.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.out = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Maps token ids (batch, seq) to logits, or, given the next tokens, to their mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits = F.linear(self.norm(self.through_blocks(x)), self.tokens.weight)
        return logits if targets is None else mean_loss(logits, targets)

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.config.recompute else block(x)
        return x


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    # A 16-bit log-softmax would round the loss to about two digits.
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


G = TypeVar("G", bound=GPT)


def build_gpt(
    config: GPTConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu", kind: type[G] = GPT
) -> G:
    """The model with GPT-2's initial values, which depend on the seed alone: a 16-bit model is the rounded fp32 one."""
    with torch.device("meta"):
        model = kind(config).to(dtype)
    model = model.to_empty(device=device)
    initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """Normal weights, zero biases, unit norms; what adds to the residual stream starts smaller the deeper the model."""
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * model.config.layers)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.zero_()
        elif "norm" in name:
            param.fill_(1.0)
        else:
            std = residual_std if name.endswith("out.weight") else INIT_STD
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float32) * std)
