"""The optimizers a program may be about. Programs speak of AdamW's hyper-parameters; each makes its own of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import zofftk
from zofftk.cpu_adam import adam_step, adamw_step
from zofftk.cpu_lion import lion_step
from zofftk.cpu_sgd import sgd_step
from zofftk.optimizer import OffloadOptimizer

Moments = dict[str, torch.Tensor]


def _zeros(moments: Moments, name: str, like: torch.Tensor) -> torch.Tensor:
    return moments.setdefault(name, torch.zeros_like(like))


def _adam(function: Callable[..., None]) -> Callable[..., None]:
    def update(
        master: torch.Tensor, moments: Moments, grad: torch.Tensor, out: torch.Tensor, group: Any, **options: Any
    ) -> None:
        states = [_zeros(moments, name, master) for name in ("exp_avg", "exp_avg_sq")]
        hyper = {"eps": group["eps"], "betas": tuple(float(beta) for beta in group["betas"])}
        hyper |= {key: float(group[key]) for key in ("lr", "weight_decay")}
        function(master, *states, grad, out=out, **hyper, **options)

    return update


def _lion(
    master: torch.Tensor, moments: Moments, grad: torch.Tensor, out: torch.Tensor, group: Any, **options: Any
) -> None:
    del options["step"]
    hyper = {"betas": group["betas"]} | {key: float(group[key]) for key in ("lr", "weight_decay")}
    lion_step(master, _zeros(moments, "exp_avg", master), grad, out=out, **hyper, **options)


def _sgd(
    master: torch.Tensor, moments: Moments, grad: torch.Tensor, out: torch.Tensor, group: Any, **options: Any
) -> None:
    del options["step"]
    hyper = {key: float(group[key]) for key in ("lr", "momentum", "dampening", "weight_decay")}
    first = "momentum_buffer" not in moments
    buffer = _zeros(moments, "momentum_buffer", master) if hyper["momentum"] else None
    sgd_step(master, buffer, grad, out=out, nesterov=group["nesterov"], first=first, **hyper, **options)


def _without_eps(hyper: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hyper.items() if key != "eps"}


def _of_sgd(hyper: dict[str, Any]) -> dict[str, Any]:
    """The first beta is the momentum, and a large eps stands for dampening."""
    own = {key: value for key, value in hyper.items() if key in ("lr", "weight_decay")}
    if "betas" in hyper:
        own |= {"momentum": hyper["betas"][0], "nesterov": False}
    if "eps" in hyper:
        own |= {"dampening": 0.5 if hyper["eps"] > 1e-6 else 0.0}
    return own


def _of_nesterov(hyper: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in hyper.items() if key in ("lr", "weight_decay")}
    if "betas" in hyper:
        own |= {"momentum": max(0.5, hyper["betas"][0]), "dampening": 0.0, "nesterov": True}
    return own


@dataclass(frozen=True)
class Choice:
    kind: type[OffloadOptimizer]
    update: Callable[..., None]  # of one parameter: master, moments, gradient, out, group, and options of the kernels
    hyper: Callable[[dict[str, Any]], dict[str, Any]]  # its own, of some of AdamW's


OPTIMIZERS = {
    "AdamW": Choice(zofftk.OffloadAdamW, _adam(lambda *args, **options: adamw_step(*args, **options)), dict),
    "Adam": Choice(zofftk.OffloadAdam, _adam(adam_step), dict),
    "Lion": Choice(zofftk.OffloadLion, _lion, _without_eps),
    "SGD": Choice(zofftk.OffloadSGD, _sgd, _of_sgd),
    "nesterov": Choice(zofftk.OffloadSGD, _sgd, _of_nesterov),
}


def edit(state: dict[str, Any]) -> None:
    """What somebody may do to the moments of a parameter."""
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        if name in state:
            state[name].mul_(0.5) if name == "exp_avg_sq" else state[name].zero_()
