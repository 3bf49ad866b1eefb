"""What has been gathered of the gradients, for those who want to see it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from zofftk.managed import Gathered, Managed
from zofftk.ranks.slices import from_slice

if TYPE_CHECKING:
    from zofftk.engine import Engine


def read(engine: Engine, managed: Managed) -> torch.Tensor:
    """A copy of the gathered gradient of one parameter, fp32 on the host, in its shape; waits for it."""
    engine.take_norms()
    flat = torch.zeros(managed.local.numel(), dtype=torch.float32)
    for bucket in managed.buckets:
        engine.device.touch(f"read the gradient of {managed.name}", reads=[bucket.gradient_source(managed.index)])
        bucket.read_gradient(managed.index, flat)
    engine.ranks.sum_parts(flat)
    return flat.div_(engine.loss_scale).view(managed.local.shape)


def not_finite(engine: Engine) -> list[str]:
    """Names of the parameters whose gathered gradient is not finite, after a step that was skipped for it."""
    return [m.name for m in engine.managed if m.is_live and not math.isfinite(m.gathered_square_sum)]


def copied(engine: Engine, index: int) -> torch.Tensor | None:
    """What a deep copy of a parameter has as its gradient."""
    engine.deliver()
    managed = engine.managed[index]
    if managed.gathered is not Gathered.LIVE:
        return None
    own = read(engine, managed).to(managed.device, managed.tensor.dtype)
    return from_slice(managed.tensor, own)
