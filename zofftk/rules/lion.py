"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zofftk import cpu_kernels
from zofftk.rules.base import Elements, Hyper, Rule
from zofftk.validation import check_at_least_0, check_betas, check_options


@dataclass(frozen=True)
class LionHyper(Hyper):
    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    @property
    def states(self) -> tuple[str, ...]:
        return LionRule.states

    def update(self, elements: Elements, *, step: int, grad_scale: float, threads: int) -> None:
        cpu_kernels.lion(
            elements.master,
            elements.moments["exp_avg"],
            elements.grad,
            elements.out,
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            grad_scale=grad_scale,
            threads=threads,
        )


@dataclass(frozen=True)
class LionRule(Rule):
    name: ClassVar = "lion"
    states: ClassVar = ("exp_avg",)
    hyper_names: ClassVar = ("lr", "betas", "weight_decay")
    saved_names: ClassVar = ("exp_avg",)

    def check(self, group: dict[str, Any]) -> None:
        check_options(group)
        check_at_least_0(group, "lr", "weight_decay")
        check_betas(group)

    def hyper(self, group: dict[str, Any]) -> LionHyper:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return LionHyper(float(group["lr"]), beta1, beta2, float(group["weight_decay"]))
