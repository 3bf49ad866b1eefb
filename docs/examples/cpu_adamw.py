"""`zofftk.CPUAdamW` in place of `torch.optim.AdamW` for a model on the CPU; everything around it stays as it was.

16-bit parameters get a float32 master in the optimizer's state. The state of float32 parameters can be loaded into
`torch.optim.AdamW`, and the other way round, as the end of this example does.
"""

from __future__ import annotations

import torch

from zofftk import CPUAdamW


def train(dtype: torch.dtype = torch.bfloat16, steps: int = 20) -> tuple[list[float], CPUAdamW]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(dtype)
    decayed, plain = model[0].weight, [p for p in model.parameters() if p is not model[0].weight]
    groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    opt = CPUAdamW(groups, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)

    inputs = torch.randn(64, 32, dtype=dtype)
    targets = inputs[:, :1].sin()
    losses = []
    for _ in range(steps):
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, opt


if __name__ == "__main__":
    losses, _ = train()
    print(f"bfloat16: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    losses, opt = train(torch.float32)
    print(f"float32:  loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    groups = [{"params": group["params"]} for group in opt.param_groups]
    torch.optim.AdamW(groups).load_state_dict(opt.state_dict())
    print("its state loads into torch.optim.AdamW")
