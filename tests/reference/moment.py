"""Lion and SGD in NumPy, operation by operation in float32, and Lion as a torch optimizer."""

import numpy as np
import torch

F = np.float32


def lion_float32(p, m, g, *, lr, beta1, beta2, weight_decay=0.0, grad_scale=1.0):
    """One step; returns new (p, m)."""
    g = g * F(grad_scale)
    direction = F(beta1) * m + F(1 - beta1) * g
    sign = np.where(np.isnan(direction), direction, np.sign(direction))
    return p * F(1 - lr * weight_decay) - F(lr) * sign, F(beta2) * m + F(1 - beta2) * g


def sgd_float32(
    p, b, g, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=False, grad_scale=1.0
):
    """One step; returns new (p, buffer)."""
    g = g * F(grad_scale)
    if weight_decay:
        g = g + F(weight_decay) * p
    if momentum:
        b = g if first else F(momentum) * b + F(1 - dampening) * g
        g = g + F(momentum) * b if nesterov else b
    return p - F(lr) * g, b


class Lion(torch.optim.Optimizer):
    """As in the paper's Algorithm 2, whole tensors, fp32."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (beta1 * m + (1 - beta1) * p.grad).sign()
                p.mul_(1 - lr * group["weight_decay"]).sub_(lr * update)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)
