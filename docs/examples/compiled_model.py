"""A model compiled with `torch.compile`: before or after the optimizer was built, gradients leave as in eager mode.

A compiled backward hands over its gradients when its whole graph has run, so there is less to hide their way down
behind: compile the blocks one by one (`block.compile()`) to keep it. "aot_eager" needs no compiler; leave `backend`
out for Inductor.
"""

from __future__ import annotations

import torch

from zofftk import OffloadAdamW


def train(steps: int = 20, device: str = "cuda" if torch.cuda.is_available() else "cpu") -> list[float]:
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    optimizer = OffloadAdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    compiled = torch.compile(model, backend="aot_eager")

    inputs = torch.randn(64, 32, device=device, dtype=torch.bfloat16)
    targets = inputs[:, :1].sin()
    losses = []
    for _ in range(steps):
        for half in (slice(0, 32), slice(32, 64)):  # two backwards to a step
            loss = (compiled(inputs[half]) - targets[half]).square().mean() / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(2 * loss.item())
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
