"""Adam in NumPy: the formula in float64, and operation by operation in float32."""

import numpy as np


def adam_float64(
    p, m, v, g, *, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True, grad_scale=1.0
):
    """One step in float64; returns new (p, m, v)."""
    p, m, v, g = (np.asarray(x, dtype=np.float64) for x in (p, m, v, g))
    g = g * grad_scale
    if decoupled:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = m + (1 - betas[0]) * (g - m)
    v = betas[1] * v + (1 - betas[1]) * g * g
    denom = np.sqrt(v) / np.sqrt(1 - betas[1] ** step) + eps
    return p - lr / (1 - betas[0] ** step) * m / denom, m, v


def adamw_float32(p, m, v, g, *, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, grad_scale=1.0):
    """One AdamW step in the kernel's own order of float32 operations; returns new (p, m, v).

    A fused multiply-add is emulated in float64, which rounds twice: right but for one element in some 2^29.
    """
    f = np.float32

    def fma(a, b, c):
        return f(np.float64(a) * np.float64(b) + np.float64(c))

    p = p * f(1 - lr * weight_decay)
    g = g * f(grad_scale)
    w1 = f(1 - betas[0])
    m = fma(w1, g - m, m) if w1 < 0.5 else fma(w1 - f(1), g - m, g)
    v = fma(f(1 - betas[1]) * g, g, f(betas[1]) * v)
    denom = np.sqrt(v) / f(np.sqrt(1 - betas[1] ** step)) + f(eps)
    return p + (f(-(lr / (1 - betas[0] ** step))) * m) / denom, m, v
