"""The factor on the loss that keeps small fp16 gradients from becoming zero, and the steps that are skipped for it.

A step whose gradients are not finite is skipped; a dynamic scale then falls, and grows again after enough good steps.
"""

from __future__ import annotations

import logging
import math
import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("zofftk")


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A dynamic loss scale: `OffloadAdamW(..., loss_scale=LossScale())`, and `opt.scale_loss(loss).backward()`.

    Attributes:
        initial: the scale of the first step.
        growth: factor after `growth_interval` good steps in a row; 1 or more.
        backoff: factor after a step that was skipped; above 0 and at most 1.
        growth_interval: good steps in a row, 1 or more.
        minimum: the scale does not fall below it. An overflow there is not the scale's doing: it stays, the step is
            skipped and counted, and a warning names a parameter whose gradient is not finite.

    Source: Micikevicius et al., Mixed Precision Training, section 3.2; defaults of `torch.amp.GradScaler`.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("minimum", 0.0, math.inf),
            ("initial", self.minimum, math.inf),
            ("growth", 1.0, math.inf),
            ("backoff", 0.0, 1.0),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not max(low, 0.0) <= float(value) <= high or float(value) == 0.0:
                limits = f"at least {low:g}" if high == math.inf else f"at most {high:g}"
                raise ValueError(f"{name} of the loss scale must be a number above 0, {limits}, got {value!r}")
        if not isinstance(self.growth_interval, int) or isinstance(self.growth_interval, bool):
            raise ValueError(f"growth_interval must be a whole number, got {self.growth_interval!r}")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval must be 1 or more, got {self.growth_interval!r}")


def check_scale_state(state: Any) -> None:
    """ValueError where `state`, saved under `loss_scale`, is none."""
    if state is None:
        return
    value, good_steps = (state.get("value"), state.get("good_steps")) if isinstance(state, dict) else (None, None)
    if not isinstance(value, numbers.Real) or not float(value) > 0 or not isinstance(good_steps, int):
        raise ValueError(f"the saved loss_scale is {state!r}, expected its value and good_steps")


class ScaleKeeper:
    """The scale now, and what has been skipped so far. A number is a scale that stays as it is; None is 1."""

    def __init__(self, rule: LossScale | float | None) -> None:
        self._rule = rule if isinstance(rule, LossScale) else None
        self.value = float(rule.initial if isinstance(rule, LossScale) else rule or 1.0)
        self.good_steps = 0  # in a row, since the scale last changed
        self.skipped_steps = 0

    def after_step(self) -> None:
        self.good_steps += 1
        if self._rule and self.good_steps == self._rule.growth_interval:
            self.good_steps = 0
            if math.isfinite(self.value * self._rule.growth):
                self._change(self.value * self._rule.growth, f"{self._rule.growth_interval} good steps")

    def after_skip(self, norm: float, culprits: Sequence[str], stacklevel: int) -> None:
        """`culprits` are the parameters whose gradient is not finite; `stacklevel` leads to who called `step()`."""
        self.skipped_steps += 1
        self.good_steps = 0
        others = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
        reason = f"a step was skipped: the norm is {norm}, the gradient of {culprits[0]}{others} is not finite"
        if self._rule and self.value > self._rule.minimum:
            self._change(max(self._rule.minimum, self.value * self._rule.backoff), reason)
            return
        logger.info("%s (%d skipped so far)", reason, self.skipped_steps)
        if self._rule:
            message = f"{reason}, with the loss scale at its minimum of {self.value:g}: the model overflows by itself"
            warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)
        elif self.skipped_steps == 1:
            warnings.warn(f"{reason}; skipped_steps counts them", RuntimeWarning, stacklevel=stacklevel)

    def _change(self, value: float, reason: str) -> None:
        logger.info("loss scale %g -> %g: %s", self.value, value, reason)
        self.value = value

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """None where there is nothing that changes."""
        return {"value": self.value, "good_steps": self.good_steps} if self._rule else None

    def load(self, state: dict[str, Any] | None) -> None:
        if self._rule and state is not None:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
