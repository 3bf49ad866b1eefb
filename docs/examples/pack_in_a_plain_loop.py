"""A plain training loop whose optimizer lives on the CPU: pack, one Adam over everything, copy back.

The model keeps 16-bit parameters only. `PackPlan` writes all gradients into one flat buffer, with their sums of
squares and a flag for values that are not finite; `adamw_step` updates the fp32 states on the CPU and leaves the new
16-bit parameters in the buffer that has just carried the gradients; `CopyBackPlan` writes them into the model. On a
GPU each plan is one Triton kernel, on the CPU it is eager torch. There is no overlap here: that is what
`zofftk.OffloadAdamW` is for.
"""

from __future__ import annotations

import torch

from zofftk.cpu_adam import adamw_step
from zofftk.triton_kernels import CopyBackPlan, PackPlan, Span, count_blocks

MAX_GRAD_NORM = 1.0


def lay_out(params: list[torch.nn.Parameter]) -> tuple[list[Span], int, int]:
    """One parameter after the other, each on a multiple of 64 elements: 16-byte accesses need aligned places."""
    spans, offset, block = [], 0, 0
    for param in params:
        spans.append(Span(0, param.numel(), offset, block))
        offset += -(-param.numel() // 64) * 64
        block += count_blocks(param.numel())
    return spans, offset, block


def train(steps: int = 20, device: str = "cuda" if torch.cuda.is_available() else "cpu") -> list[float]:
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    params = list(model.parameters())

    spans, numel, num_blocks = lay_out(params)
    dtypes = [param.dtype for param in params]
    pack, copy_back = PackPlan(spans, dtypes, device), CopyBackPlan(spans, dtypes, device)
    flat_dev = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    sums_dev = torch.zeros(num_blocks, dtype=torch.float64, device=device)
    flag_dev = torch.zeros(1, dtype=torch.int32, device=device)

    pack(params, flat_dev)  # parameters go the same way once: the fp32 states on the CPU start from them
    master_host = flat_dev.float().cpu()
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    flat_host = torch.zeros(numel, dtype=torch.bfloat16, pin_memory=device == "cuda")

    inputs = torch.randn(64, 32, device=device, dtype=torch.bfloat16)
    targets = inputs[:, :1].sin()
    losses = []
    for step in range(1, steps + 1):
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        pack([param.grad for param in params], flat_dev, sums_dev, flag_dev.zero_())
        model.zero_grad()
        losses.append(loss.item())
        if flag_dev.item():
            continue  # a gradient is not finite: skip the step
        norm = sums_dev.sum().sqrt().item()
        flat_host.copy_(flat_dev)
        scale = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
        states = master_host, exp_avg, exp_avg_sq
        adamw_step(*states, flat_host, step=step, lr=3e-3, grad_scale=scale, out=flat_host)
        flat_dev.copy_(flat_host)
        copy_back(flat_dev, params)
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
