"""What both sides of a program do alike: draw numbers, run backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.programs.draw import Program
from tests.programs.models import RandomModel, losses_of
from tests.programs.optimizers import OPTIMIZERS


def build_model(program: Program) -> RandomModel:
    torch.manual_seed(program.seed)
    model = RandomModel(program.blocks, program.width)
    for position, param in enumerate(model.parameters()):
        param.requires_grad_(position not in program.frozen)
    return model


def initial_groups(program: Program, model: RandomModel) -> list[dict[str, Any]]:
    """Lists of (name, parameter); groups that would be empty are left out."""
    held = {id(p) for i in program.held_back for p in model.blocks[i].parameters()}
    named = [(name, param) for name, param in model.named_parameters() if id(param) not in held]
    size = len(program.groups)
    hypers = [OPTIMIZERS[program.optimizer].hyper(group) for group in program.groups]
    groups = [{**hyper, "params": named[number::size]} for number, hyper in enumerate(hypers)]
    return [group for group in groups if group["params"]]


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    """fp32, in the shape of `like`."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def gradient_by_hand(like: torch.Tensor, seed: int, bad: bool, wide: bool) -> torch.Tensor:
    """In the layout of `like`, as autograd asks for, and in fp32 where p.grad takes that and it is to be wide.

    A bad one has an element that is infinite.
    """
    dtype = torch.float32 if wide and like.grad_dtype is None else like.dtype
    grad = torch.empty_like(like.detach(), dtype=dtype).copy_(noise(like, seed))
    if bad and grad.numel():
        grad[(0,) * grad.dim()] = float("inf")
    return grad


def clip(params: list[Any], max_norm: float, how: str) -> torch.Tensor:
    """torch's functions for it."""
    if how == "in two":
        norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm
    options = {"foreach": {"foreach": True}, "strict": {"error_if_nonfinite": True}}.get(how, {})
    return torch.nn.utils.clip_grad_norm_(params, max_norm, **options)


def damaged(saved: dict[str, Any], damage: str) -> dict[str, Any]:
    """A saved state that no optimizer can take; the first parameter with a state is the one damaged."""
    if damage == "groups":
        saved["param_groups"].append(saved["param_groups"][0])
    elif damage == "lr":
        saved["param_groups"][-1]["lr"] = -1.0
    elif states := [state for state in saved["state"].values() if state]:
        states[0].update({"step": -1} if damage == "step" else {"master": torch.zeros(3, 1, 4, 1, 5)})
    return saved


def half_edited(value: torch.Tensor, seed: int) -> torch.Tensor:
    """About half of the elements moved."""
    moved = noise(value, seed)
    return torch.where(moved > 0, value.detach().float() + 0.05 * moved, value.detach().float()).to(value.dtype)


def run_backward(
    model: RandomModel,
    program: Program,
    begin: Callable[[], None],
    *,
    data: int,
    skip: int,
    weight: float,
    how: str = "one",
    autocast: bool = False,
) -> list[torch.Tensor]:
    """`begin` is called before each backward."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = losses_of(model, data, program.width, skip)
    begin()
    inputs = [param for param in model.parameters() if param.requires_grad][::2]
    if how == "inputs" and inputs and not any(spec.checkpoint for spec in program.blocks):
        (losses[0] * weight).backward(inputs=inputs)
    elif how in ("one", "inputs"):
        (losses[0] * weight).backward()
    elif how == "both":
        torch.autograd.backward([losses[0] * weight, losses[1]])
    else:
        (losses[0] * weight).backward(retain_graph=True)
        begin()
        (losses[1] if how == "twice" else losses[0]).backward()
    return [loss.detach() for loss in losses]
