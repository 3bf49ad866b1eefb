"""The format of a saved state, which is `torch.optim.AdamW`'s, and a saved one against the parameters it is for.

Torch's AdamW loads a state with masters, casts everything in it but `step` to the parameter's dtype, and trains on
without a look at the masters. So a master counts only while its `master_step` is the state's `step` and is still of
the dtype it was saved in; else the parameter is what the state belongs to.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from zofftk.validation import check_hyper

logger = logging.getLogger("zofftk")

# What `torch.optim.AdamW` has in its groups beside the numbers; foreach, capturable and fused have no effect here.
TORCH_GROUP: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
STATES = ("exp_avg", "exp_avg_sq", "master")  # of each parameter, fp32, in its shape
COUNTS = {"step": torch.float32, "master_step": torch.int64}  # of each parameter; the updates behind moments and master


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
    params = [param for group in param_groups for param in group["params"]]
    saved_ids = [number for group in groups for number in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    stale: list[str] = []
    for saved_id, param in zip(saved_ids, params, strict=True):
        if saved := state_dict["state"].get(saved_id):
            _check_state(saved, param, names[id(param)])
            saved = dict(saved)
            if saved.get("master") is None:
                saved.pop("master", None)
            elif not _has_current_master(saved):
                stale.append(names[id(param)])
                del saved["master"]
            saved.pop("master_step", None)
            states[id(param)] = saved
    if stale:
        logger.warning(
            "another optimizer has gone on with the saved state, whose masters are older than its moments: the masters "
            "of %d parameters, the first of them %s, are taken from the parameters",
            len(stale),
            stale[0],
        )
    return states


def _has_current_master(saved: dict[str, Any]) -> bool:
    if saved["master"].dtype != torch.float32:
        return False
    mark = saved.get("master_step")
    if not isinstance(mark, torch.Tensor):
        return mark is None or float(mark) == float(saved["step"])  # none: of an optimizer that keeps none
    return mark.dtype == COUNTS["master_step"] and mark.numel() == 1 and float(mark) == float(saved["step"])


def entries_of_others(saved: dict[str, Any]) -> dict[str, Any]:
    """What in a parameter's state is not this package's: it is kept, and saved again."""
    return {key: value for key, value in saved.items() if key not in STATES and key not in COUNTS}


def on_host(saved: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state with its tensors on the CPU; those that are there already are not copied."""
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in saved.items()}


def groups_to_load(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `torch.optim.AdamW` does it: entries that older states lack get their defaults, the decay is decoupled."""
    missing = [{key: value for key, value in TORCH_GROUP.items() if key not in group} for group in groups]
    fixed = {"decoupled_weight_decay": True}
    return [{**group, **defaults, **fixed} for group, defaults in zip(groups, missing, strict=True)]


def _check_state(saved: dict[str, Any], param: torch.Tensor, name: str) -> None:
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
        if value.shape != param.shape:
            raise ValueError(f"the saved {key} of {name} has shape {tuple(value.shape)}, expected {tuple(param.shape)}")
