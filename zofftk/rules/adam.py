"""Adam and AdamW: `torch.optim.Adam` and `torch.optim.AdamW`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zofftk import cpu_kernels
from zofftk.rules.base import Elements, Hyper, Rule
from zofftk.validation import check_at_least_0, check_betas, check_options


@dataclass(frozen=True)
class AdamHyper(Hyper):
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    @property
    def states(self) -> tuple[str, ...]:
        return AdamRule.states

    def update(self, elements: Elements, *, step: int, grad_scale: float, threads: int) -> None:
        cpu_kernels.adam(
            elements.master,
            elements.moments["exp_avg"],
            elements.moments["exp_avg_sq"],
            elements.grad,
            elements.out,
            step=step,
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            decoupled=self.decoupled,
            grad_scale=grad_scale,
            threads=threads,
        )


@dataclass(frozen=True)
class AdamRule(Rule):
    """`decoupled`: the decay shrinks the parameter (AdamW); else it is added to the gradient (Adam)."""

    decoupled: bool
    name: ClassVar = "adam"
    states: ClassVar = ("exp_avg", "exp_avg_sq")
    hyper_names: ClassVar = ("lr", "betas", "eps", "weight_decay")
    saved_names: ClassVar = ("step", "exp_avg", "exp_avg_sq")

    @property
    def torch_group(self) -> dict[str, Any]:
        switches: dict[str, Any] = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False}
        return switches | {"differentiable": False, "fused": None, "decoupled_weight_decay": self.decoupled}

    def check(self, group: dict[str, Any]) -> None:
        check_options(group)
        check_at_least_0(group, "lr", "eps", "weight_decay")
        check_betas(group)
        decoupled = group.get("decoupled_weight_decay", self.decoupled)  # torch's, in the groups of a checkpoint
        if decoupled != self.decoupled and float(group["weight_decay"]) != 0.0:
            raise ValueError(f"decoupled_weight_decay={decoupled} is {'AdamW' if decoupled else 'Adam'}'s decay")

    def hyper(self, group: dict[str, Any]) -> AdamHyper:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return AdamHyper(
            float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]), self.decoupled
        )
