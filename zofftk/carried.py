"""What a saved state holds beside torch's `state` and `param_groups`, for tools that hand on these two alone.

A copy of it goes along in each group: `torch.distributed.checkpoint`'s `get_optimizer_state_dict` keeps groups whole.
So do torch's own optimizers, which may then go on; the copy would speak of a state that is gone. It therefore says how
many updates there had been. It is a text, because that package takes dicts apart, and looks for the keys of its reader.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from zofftk.config import OffloadConfig
from zofftk.loss_scale import LossScale
from zofftk.state_dict import saved_step

KEY = "zofftk"
ENTRIES = ("loss_scale", "delayed")
_UPDATES = "updates"


def room(config: OffloadConfig) -> dict[str, Any]:
    """For the groups of an optimizer that saves such entries: that package reads what has a place there already."""
    saves = config.update == "delayed" or isinstance(config.loss_scale, LossScale)
    return {KEY: None} if saves else {}


def attach(saved: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """`saved`, a fresh state dict, with `entries` beside its own and in its groups."""
    if entries:
        for group in saved["param_groups"]:
            group[KEY] = json.dumps({**entries, _UPDATES: _updates(saved)})
    return saved | entries


def restored(saved: Any) -> Any:
    """`saved` with the entries where `attach` has put them: from its first group, if they are nowhere else."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not groups or not isinstance(saved.get("state"), dict) or not all(isinstance(group, dict) for group in groups):
        return saved
    plain = {**saved, "param_groups": [{key: group[key] for key in group if key != KEY} for group in groups]}
    copy: Any = None
    with suppress(TypeError, ValueError):  # it is None, or no such text
        copy = json.loads(groups[0].get(KEY))
    if not isinstance(copy, dict) or any(key in saved for key in ENTRIES) or copy.get(_UPDATES) != _updates(saved):
        return plain
    return plain | {key: copy[key] for key in ENTRIES if key in copy}


def _updates(saved: dict[str, Any]) -> float:
    """Of all parameters together."""
    return sum(saved_step(state) for state in saved["state"].values() if state)
