"""The whole update as one call: no buckets, no streams, no engine. What the engine must equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from zofftk import cpu_kernels
from zofftk.layout import BLOCK_NUMEL
from zofftk.rules.adam import AdamRule
from zofftk.rules.base import Elements, Rule


class Unbucketed:
    """fp32 states of all parameters in one flat tensor each; `step` takes the gradients as autograd left them."""

    def __init__(
        self, params: Sequence[torch.Tensor], rule: Rule, group: dict[str, Any], max_grad_norm: float | None = None
    ) -> None:
        self.params = list(params)
        self.hyper = rule.hyper(group)
        self.max_grad_norm = max_grad_norm
        self.master = torch.cat([p.detach().float().reshape(-1) for p in self.params])
        self.moments = {name: torch.zeros_like(self.master) for name in self.hyper.states}
        self.steps = 0

    def norm(self, grads: Sequence[torch.Tensor]) -> float:
        total = 0.0
        for grad in grads:
            sums = torch.empty(-(-grad.numel() // BLOCK_NUMEL), dtype=torch.float64)
            cpu_kernels.block_square_sums(grad.reshape(-1).contiguous(), sums, 1)
            param = 0.0
            for block in sums.tolist():
                param += block
            total += param
        return math.sqrt(total)

    def step(self, grads: Sequence[torch.Tensor]) -> float:
        norm = self.norm(grads)
        coefficient = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        self.steps += 1
        hyper = self.hyper if self.steps > 1 else self.hyper.first()
        elements = Elements(
            self.master, self.moments, torch.cat([grad.reshape(-1) for grad in grads]), torch.empty_like(self.master)
        )
        hyper.update(elements, step=self.steps, grad_scale=coefficient, threads=1)
        with torch.no_grad():
            for param, master in zip(self.params, self.split(self.master), strict=True):
                param.copy_(master)
        return norm

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]


class UnbucketedAdamW(Unbucketed):
    def __init__(self, params: Sequence[torch.Tensor], *, lr: float, max_grad_norm: float | None = None) -> None:
        group = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        super().__init__(params, AdamRule(decoupled=True), group, max_grad_norm)
        self.exp_avg, self.exp_avg_sq = self.moments["exp_avg"], self.moments["exp_avg_sq"]
