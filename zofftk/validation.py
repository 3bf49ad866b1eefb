"""What a user may hand to an optimizer: checked at the door, each error naming what was expected and what came."""

from __future__ import annotations

from typing import Any

import torch

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parameter_name(group: dict[str, Any], group_number: int, number: int) -> str:
    names = group.get("param_names")
    return repr(names[number]) if names else f"parameter {number} of group {group_number}"


def check_param(param: torch.Tensor, name: str) -> None:
    if param.layout != torch.strided:
        raise TypeError(f"{name} is {param.layout}, expected a dense tensor")
    if param.dtype not in PARAM_DTYPES:
        raise TypeError(f"{name} is {param.dtype}, expected one of {', '.join(str(d) for d in PARAM_DTYPES)}")
    if param.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, expected a tensor with data: materialise the model first")


def check_hyper(group: dict[str, Any]) -> None:
    for key in ("lr", "eps", "weight_decay"):
        if isinstance(group[key], torch.Tensor) and group[key].numel() != 1:
            raise ValueError(f"{key} must be one number, got a tensor of shape {tuple(group[key].shape)}")
        if not float(group[key]) >= 0.0:
            raise ValueError(f"{key} must be 0 or more, got {group[key]!r}")
    betas = tuple(group["betas"])
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {group['betas']!r}")
