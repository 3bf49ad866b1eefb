"""A saved optimizer state against the parameters it is to be loaded for."""

from __future__ import annotations

from typing import Any

from zofftk.managed import Managed

STATES = ("exp_avg", "exp_avg_sq", "master")  # of each parameter, fp32, in its shape


def match_states(
    state_dict: dict[str, Any], param_groups: list[dict[str, Any]], managed_by_id: dict[int, Managed]
) -> dict[int, dict[str, Any]]:
    """The saved state of each managed parameter, checked; ValueError says what does not fit."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    if groups is None or "state" not in state_dict:
        raise ValueError("load_state_dict expects a dict with 'state' and 'param_groups', as state_dict() returns")
    sizes, saved_sizes = [len(g["params"]) for g in param_groups], [len(g["params"]) for g in groups]
    if sizes != saved_sizes:
        raise ValueError(f"the saved groups hold {saved_sizes} parameters, this optimizer's hold {sizes}")
    params = [param for group in param_groups for param in group["params"]]
    saved_ids = [number for group in groups for number in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for saved_id, param in zip(saved_ids, params, strict=True):
        saved = state_dict["state"].get(saved_id)
        managed = managed_by_id.get(id(param))
        if not saved or managed is None:
            continue
        for name in ("step", "exp_avg", "exp_avg_sq"):
            if name not in saved:
                raise ValueError(f"the saved state of {managed.name} has no {name!r}")
        for name in STATES:
            shape = tuple(saved[name].shape) if saved.get(name) is not None else tuple(param.shape)
            if shape != tuple(param.shape):
                raise ValueError(f"the saved {name} of {managed.name} has shape {shape}, expected {tuple(param.shape)}")
        states[managed.index] = saved
    return states
