"""`OffloadSGD`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zofftk.config import OffloadConfig
from zofftk.optimizer import OffloadOptimizer
from zofftk.rules.sgd import SGDRule


class OffloadSGD(OffloadOptimizer):
    """SGD, with momentum or without, with the fp32 states on the host.

    Gradients, stand-ins, skipped steps and checkpoints are as in `OffloadAdamW`. As in torch, a parameter's momentum
    buffer starts as its first gradient.

    On the host: 8 bytes a parameter (`master`, `momentum_buffer`) and the gradient's; 4 and the gradient's while none
    of the parameters that were added together has momentum.

    Args:
        params: as in `OffloadAdamW`.
        lr: learning rate (a float or a 0-dim tensor).
        momentum: decay rate of the buffer, 0 or more; 0 goes without one. It may change at any time.
        dampening: the gradient enters the buffer times 1 - dampening, except for the first.
        weight_decay: times the parameter, added to the gradient after clipping.
        nesterov: the update looks one step ahead; needs momentum and no dampening.
        config, **options: the engine's, as in `OffloadAdamW`.

    Raises:
        TypeError, ValueError: as `OffloadAdamW`.

    Source: the update is that of `torch.optim.SGD`.
    """

    rule = SGDRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        config: OffloadConfig | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening}
        defaults |= {"weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, config, options)
