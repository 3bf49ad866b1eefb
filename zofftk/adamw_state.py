"""A state dict of AdamW, looked at as a whole before any of it is loaded."""

from collections.abc import Sequence
from typing import Any

import torch

from zofftk.cpu_arguments import as_number

NUMBERS = ("lr", "betas", "eps", "weight_decay")
MOMENTS = ("exp_avg", "exp_avg_sq")


def checked_states(saved: Any, groups: Sequence[dict[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
    """The saved state of every parameter of `groups`, float32 and in memory of its own.

    Raises ValueError or TypeError that names the first group or entry which does not fit.
    """
    for name, kind in (("state", dict), ("param_groups", list | tuple)):
        if not isinstance(saved.get(name), kind):
            raise TypeError(f"{name}: expected one in a state dict, got {type(saved.get(name)).__name__}")
    own_sizes, sizes = [len(group["params"]) for group in groups], []
    for number, group in enumerate(saved["param_groups"]):
        if missing := [name for name in ("params", *NUMBERS) if name not in group]:
            raise ValueError(f"group {number} of the state dict: expected {missing[0]}, it has none")
        sizes.append(len(group["params"]))
    if sizes != own_sizes:
        raise ValueError(f"expected groups of {own_sizes} parameters, as in the optimizer, loaded state dict: {sizes}")
    ids = [index for group in saved["param_groups"] for index in group["params"]]
    params = [param for group in groups for param in group["params"]]
    pairs = zip(ids, params, strict=True)
    return {param: _checked(index, saved["state"][index], param) for index, param in pairs if index in saved["state"]}


def _checked(index: Any, entry: Any, param: torch.Tensor) -> dict[str, Any]:
    where = f"state of parameter {index}"
    if not isinstance(entry, dict):
        raise TypeError(f"{where}: expected a dict, got {type(entry).__name__}")
    own = dict(entry)
    if not own:
        return own
    for name in ("step", *MOMENTS):
        if name not in own:
            raise ValueError(f"{where}: expected {name}, it has none")
    step = as_number(f"{where}: step", own["step"])
    if not (step >= 0 and step.is_integer()):
        raise ValueError(f"{where}: step: expected a whole number of 0 or more, got {own['step']!r}")
    own["step"] = torch.tensor(step, dtype=torch.float32)
    if param.dtype == torch.float32:
        own.pop("master", None)  # the parameter is its own master
    for name in (*MOMENTS, "master"):
        if name in own:
            own[name] = _own_tensor(f"{where}: {name}", own[name], param)
    return own


def _own_tensor(what: str, value: Any, param: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.device.type == "meta" or not value.is_floating_point():
        raise ValueError(
            f"{what}: expected dense floating-point values, got {value.dtype}, {value.layout} on {value.device}"
        )
    if value.shape != param.shape:
        raise ValueError(f"{what}: expected shape {tuple(param.shape)}, got {tuple(value.shape)}")
    own = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    return own.copy_(value.detach())
