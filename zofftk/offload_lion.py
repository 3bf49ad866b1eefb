"""`OffloadLion`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zofftk.config import OffloadConfig
from zofftk.optimizer import OffloadOptimizer
from zofftk.rules.lion import LionRule


class OffloadLion(OffloadOptimizer):
    """Lion, which moves each element by lr in the direction of a sign, with the fp32 states on the host.

    With gradient g: p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p), then
    m = beta2 * m + (1 - beta2) * g. Gradients, stand-ins, skipped steps and checkpoints are as in `OffloadAdamW`.

    On the host: 8 bytes a parameter (`master`, `exp_avg`) and the gradient's.

    Args:
        params: as in `OffloadAdamW`.
        lr: learning rate (a float or a 0-dim tensor): the size of each element's move. Three to ten times smaller
            than AdamW's.
        betas: the moment's weight in the direction, and its decay rate, each in [0, 1).
        weight_decay: decoupled decay, scaled by lr; the smaller lr wants a larger one than in AdamW.
        config, **options: the engine's, as in `OffloadAdamW`.

    Raises:
        TypeError, ValueError: as `OffloadAdamW`.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2.
    """

    rule = LionRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        config: OffloadConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, config, options)
