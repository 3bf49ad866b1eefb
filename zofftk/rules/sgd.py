"""SGD with momentum, dampening, Nesterov's variant and decay: `torch.optim.SGD`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zofftk import cpu_kernels
from zofftk.rules.base import Elements, Hyper, Rule
from zofftk.validation import check_at_least_0, check_number, check_options


@dataclass(frozen=True)
class SGDHyper(Hyper):
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    is_first: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        return SGDRule.states if self.momentum != 0.0 else ()

    def first(self) -> SGDHyper:
        """The buffer becomes the gradient, which dampening leaves as it is."""
        return replace(self, is_first=True)

    def update(self, elements: Elements, *, step: int, grad_scale: float, threads: int) -> None:
        cpu_kernels.sgd(
            elements.master,
            elements.moments["momentum_buffer"] if self.states else None,
            elements.grad,
            elements.out,
            lr=self.lr,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            first=self.is_first,
            grad_scale=grad_scale,
            threads=threads,
        )


@dataclass(frozen=True)
class SGDRule(Rule):
    name: ClassVar = "sgd"
    states: ClassVar = ("momentum_buffer",)
    hyper_names: ClassVar = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    saved_names: ClassVar = ()  # torch saves no state where there is no momentum, and never a step

    @property
    def torch_group(self) -> dict[str, Any]:
        return {"maximize": False, "foreach": None, "differentiable": False, "fused": None}

    def check(self, group: dict[str, Any]) -> None:
        check_options(group)
        check_at_least_0(group, "lr", "momentum", "weight_decay")
        check_number(group, "dampening")
        if group["nesterov"] and (float(group["momentum"]) == 0.0 or float(group["dampening"]) != 0.0):
            raise ValueError("nesterov needs momentum above 0 and dampening 0")

    def hyper(self, group: dict[str, Any]) -> SGDHyper:
        lr, momentum, dampening = (float(group[name]) for name in ("lr", "momentum", "dampening"))
        return SGDHyper(lr, momentum, dampening, float(group["weight_decay"]), bool(group["nesterov"]))
