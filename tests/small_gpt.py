"""A real, small GPT of plain torch modules: embedding, attention, tied head, layer norms, odd sizes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class SmallGPT(nn.Module):
    """`vocab` words, `layers` blocks of width `hidden`; the head is tied to the embedding."""

    def __init__(self, vocab: int = 211, hidden: int = 48, layers: int = 2, heads: int = 4, seq: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def build(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> SmallGPT:
    """The same weights on every call."""
    torch.manual_seed(1234)
    return SmallGPT(**sizes).to(dtype)


def loss_of(model: nn.Module, step: int, vocab: int = 211) -> torch.Tensor:
    """The loss on the batch of `step`, the same on every call."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, vocab, (2, 17), generator=generator)
    logits = model(ids[:, :-1])
    return functional.cross_entropy(logits.float().view(-1, vocab), ids[:, 1:].reshape(-1))
