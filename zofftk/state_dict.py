"""A saved optimizer state against the parameters it is to be loaded for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zofftk.loss_scale import check_scale_state
from zofftk.policies import check_saved_lateness
from zofftk.rules.base import Rule

MASTER = "master"  # the fp32 parameter, beside the moments of the rule
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")  # of any optimizer


def saved_step(saved: dict[str, Any]) -> float:
    """Updates so far; 1 where an optimizer does not save them (`torch.optim.SGD`), -1 for what is no number."""
    step = saved.get("step", 1)
    return float(step) if not isinstance(step, torch.Tensor) or step.numel() == 1 else -1.0


def match_states(
    state_dict: dict[str, Any], param_groups: list[dict[str, Any]], names: dict[int, str], rule: Rule
) -> dict[int, dict[str, Any]]:
    """The saved state of each parameter, by its id, checked; ValueError says what does not fit."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    if groups is None or not isinstance(state_dict.get("state"), dict):
        raise ValueError("load_state_dict expects a dict with 'state' and 'param_groups', as state_dict() returns")
    sizes, saved_sizes = [len(g["params"]) for g in param_groups], [len(g["params"]) for g in groups]
    if sizes != saved_sizes:
        raise ValueError(f"the saved groups hold {saved_sizes} parameters, this optimizer's hold {sizes}")
    for number, group in enumerate(groups):
        if missing := [key for key in rule.hyper_names if key not in group]:
            raise ValueError(f"the saved group {number} has no {missing[0]!r}")
        rule.check_group(group)
    check_scale_state(state_dict.get("loss_scale"))
    params = [param for group in param_groups for param in group["params"]]
    saved_ids = [number for group in groups for number in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for saved_id, param in zip(saved_ids, params, strict=True):
        if saved := state_dict["state"].get(saved_id):
            check_state(saved, param, names[id(param)], rule)
            states[id(param)] = saved
    check_saved_lateness(state_dict.get("delayed"), [id(param) in states for param in params])
    return states


def entries_of_others(rule: Rule, saved: dict[str, Any]) -> dict[str, Any]:
    """What in a parameter's state is not this package's: it is kept, and saved again."""
    own = {"step", MASTER, *rule.states}
    return {key: value for key, value in saved.items() if key not in own}


def blank_state(param: torch.Tensor, moments: Sequence[str]) -> dict[str, Any]:
    """To read a saved state into. Its memory is taken when it is written to, if it is."""
    names = (*moments, MASTER)
    return {"step": torch.zeros((), dtype=torch.float32)} | {
        name: torch.empty(param.shape, dtype=torch.float32) for name in names
    }


def on_host(saved: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state with its tensors on the CPU; those that are there already are not copied."""
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in saved.items()}


def groups_to_load(rule: Rule, groups: list[dict[str, Any]], room: dict[str, Any]) -> list[dict[str, Any]]:
    """As torch does it: entries that older states lack get their defaults; the kind of decay is the optimizer's own."""
    extras = rule.torch_group | room
    fixed = {key: extras[key] for key in ("decoupled_weight_decay",) if key in extras}
    missing = [{key: value for key, value in extras.items() if key not in group} for group in groups]
    return [{**group, **defaults, **fixed} for group, defaults in zip(groups, missing, strict=True)]


def check_state(saved: dict[str, Any], param: torch.Tensor, name: str, rule: Rule) -> None:
    """ValueError where `saved` cannot be the state of `param`."""
    for key in rule.saved_names:
        if saved.get(key) is None:
            raise ValueError(f"the saved state of {name} has no {key!r}")
    for key in MOMENTS:
        if key not in rule.states and saved.get(key) is not None:
            raise ValueError(f"the saved state of {name} has {key!r}, which is another optimizer's")
    step = saved_step(saved)
    if not (step >= 0 and step.is_integer()):
        raise ValueError(f"the saved step of {name} is {saved.get('step')!r}, expected a whole number of 0 or more")
    for key in (*rule.states, MASTER):
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
