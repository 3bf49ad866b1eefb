"""`OffloadAdamW` and `OffloadAdam`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zofftk.config import OffloadConfig
from zofftk.optimizer import OffloadOptimizer
from zofftk.rules.adam import AdamRule


class OffloadAdamW(OffloadOptimizer):
    """AdamW (decoupled weight decay) whose fp32 states live on the host, updated there by all cores.

    Gradients leave the device while backward runs; `p.grad` then holds a stand-in that answers `clip_grad_norm_`,
    norms, scaling and `zero_grad`, and refuses with a sentence what needs the values (`grad(p)` reads them). The
    parameters stay where they are; each new value is the fp32 master rounded to the parameter's dtype. A step whose
    gradients are not all finite changes nothing and is counted in `skipped_steps`.

    On the host: 12 bytes a parameter (`master`, `exp_avg`, `exp_avg_sq`) and the gradient's.

    Args:
        params: tensors, (name, tensor) pairs, or dicts that define groups, as for any torch optimizer. fp32, bf16 or
            fp16, dense, real, of any shape, also empty.
        lr: learning rate (a float or a 0-dim tensor).
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, scaled by lr.
        config: the engine's options, see `OffloadConfig`.
        **options: the same options, as keywords; they go before `config`.

    Raises:
        TypeError: an option that does not exist; a parameter of another dtype or layout.
        ValueError: a value out of range; no parameters; parameters on an unsupported device.

    Source: ZeRO-Offload, sections 4.1 and 5.1; the update is that of `torch.optim.AdamW`.
    """

    rule = AdamRule(decoupled=True)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        config: OffloadConfig | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, config, options)


class OffloadAdam(OffloadOptimizer):
    """Adam, its weight decay added to the gradient (L2), with the fp32 states on the host.

    Gradients, stand-ins, skipped steps and checkpoints are as in `OffloadAdamW`.

    On the host: 12 bytes a parameter (`master`, `exp_avg`, `exp_avg_sq`) and the gradient's.

    Args:
        params, lr, betas, eps: as in `OffloadAdamW`.
        weight_decay: times the parameter, added to the gradient after clipping.
        config, **options: the engine's, as in `OffloadAdamW`.

    Raises:
        TypeError, ValueError: as `OffloadAdamW`.

    Source: the update is that of `torch.optim.Adam`.
    """

    rule = AdamRule(decoupled=False)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        config: OffloadConfig | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, config, options)
