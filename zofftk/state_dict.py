"""A saved optimizer state against the parameters it is to be loaded for."""

from __future__ import annotations

from typing import Any

import torch

from zofftk.loss_scale import check_scale_state
from zofftk.validation import check_hyper

STATES = ("exp_avg", "exp_avg_sq", "master")  # of each parameter, fp32, in its shape


def match_states(
    state_dict: dict[str, Any], param_groups: list[dict[str, Any]], names: dict[int, str]
) -> dict[int, dict[str, Any]]:
    """The saved state of each parameter, by its id, checked; ValueError says what does not fit."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    if groups is None or not isinstance(state_dict.get("state"), dict):
        raise ValueError("load_state_dict expects a dict with 'state' and 'param_groups', as state_dict() returns")
    sizes, saved_sizes = [len(g["params"]) for g in param_groups], [len(g["params"]) for g in groups]
    if sizes != saved_sizes:
        raise ValueError(f"the saved groups hold {saved_sizes} parameters, this optimizer's hold {sizes}")
    for number, group in enumerate(groups):
        if missing := [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]:
            raise ValueError(f"the saved group {number} has no {missing[0]!r}")
        check_hyper(group)
    check_scale_state(state_dict.get("loss_scale"))
    params = [param for group in param_groups for param in group["params"]]
    saved_ids = [number for group in groups for number in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for saved_id, param in zip(saved_ids, params, strict=True):
        if saved := state_dict["state"].get(saved_id):
            check_state(saved, param, names[id(param)])
            states[id(param)] = saved
    return states


def check_state(saved: dict[str, Any], param: torch.Tensor, name: str) -> None:
    """ValueError where `saved` cannot be the state of `param`."""
    for key in ("step", "exp_avg", "exp_avg_sq"):
        if saved.get(key) is None:
            raise ValueError(f"the saved state of {name} has no {key!r}")
    step = float(saved["step"]) if not isinstance(saved["step"], torch.Tensor) or saved["step"].numel() == 1 else -1.0
    if not (step >= 0 and step.is_integer()):
        raise ValueError(f"the saved step of {name} is {saved['step']!r}, expected a whole number of 0 or more")
    for key in STATES:
        value = saved.get(key)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"the saved {key} of {name} is {kind}, expected a tensor of real numbers")
        if value.layout != torch.strided or value.device.type == "meta":
            raise ValueError(f"the saved {key} of {name} is {value.layout} on {value.device}, expected dense values")
        if value.shape != param.shape:
            raise ValueError(f"the saved {key} of {name} has shape {tuple(value.shape)}, expected {tuple(param.shape)}")
