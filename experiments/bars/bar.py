"""One bar of a figure: the steps that it may show, of which the fastest is what is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from experiments.paper_values import OOM
from zofftk.baselines.ladder import ladder
from zofftk.baselines.prediction import Prediction, predict
from zofftk.profile import Profile

Value = float | str  # TFLOPS of one device, or OOM


@dataclass(frozen=True)
class Step:
    """Of a system on a model of the ladder; `options` are those of `predict`."""

    system: str
    size: float  # billions of parameters, as printed
    ranks: int
    slices: int
    micro_batch: int
    micro_batches: int
    options: tuple[tuple[str, Any], ...] = ()

    def predict(self, profile: Profile, *, only_time: bool = True) -> Prediction:
        return predict(
            self.system,
            ladder()[self.size],
            profile,
            ranks=self.ranks,
            slices=self.slices,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            only_time=only_time,
            **dict(self.options),
        )

    def tflops(self, profile: Profile) -> float:
        """Of one device: the work of attention's scores and of the head counts too, as in Megatron-LM's formula,
        96·B·s·L·h²·(1 + s/(6h) + V/(16·L·h)). The paper does not say which it uses."""
        config = ladder()[self.size]
        more = config.seq / (6 * config.hidden) + config.vocab / (16 * config.layers * config.hidden)
        return self.predict(profile).tflops * (1 + more)


@dataclass(frozen=True)
class Bar:
    """`system`, `x_name` and `x` are the paper's words.

    `ours` marks a system that is not in the paper's figure.
    """

    figure: str
    system: str
    x_name: str
    x: str
    choose: Callable[[], tuple[Step, ...]]  # takes as long as it takes to find what fits
    ours: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.figure, self.system, self.x

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """None: nothing fits."""
        return self.choose()

    def predict(self, profile: Profile) -> tuple[Value, Step | None]:
        """TFLOPS and the step that reaches them."""
        if not self.steps:
            return OOM, None
        reached = {step: step.tflops(profile) for step in self.steps}
        best = max(reached, key=lambda step: reached[step])
        return reached[best], best


Counts = Mapping[str, int]  # micro-batches of a step, by figure, where the figure does not say
