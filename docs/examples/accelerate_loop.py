"""A loop with `accelerate` whose optimizer lives on the CPU.

`prepare`, `accumulate`, `clip_grad_norm_`, `save_state` and `load_state` work as with `torch.optim.AdamW`. The model is
on its device before the optimizer is built, and a saved state is loaded after `prepare`: `prepare` takes the
optimizer's state through the device and back, which costs nothing while it is empty. Over ranks, `prepare` also puts
DistributedDataParallel around the model: hand that over, with `zofftk.offload(model, optimizer)`, to the optimizer,
which averages the gradients itself.
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator

from zofftk import OffloadAdamW


def train(epochs: int = 4) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    layers = torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)
    model = torch.nn.Sequential(*layers).to(accelerator.device, torch.bfloat16)
    optimizer = OffloadAdamW(model.parameters(), lr=3e-3)
    inputs = torch.randn(128, 32, dtype=torch.bfloat16)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1].sin())
    batches = torch.utils.data.DataLoader(data, batch_size=16)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(epochs):
            total = 0.0
            for x, y in batches:
                with accelerator.accumulate(model):
                    loss = (model(x) - y).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                total += loss.item()
            losses.append(total / len(batches))
            accelerator.save_state(folder)
        accelerator.load_state(folder)
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
