"""Between `optimizer.state`, the parameters and the host's arenas: what is shown of these, and what is taken over."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from zofftk.engine import Engine
from zofftk.host_views import HostViews, edited_states, finisher
from zofftk.managed import Managed
from zofftk.state_dict import MASTER, saved_step

Shown = MutableMapping[torch.Tensor, Any]  # `optimizer.state`


def publish(engine: Engine, shown: Shown, managed: Managed) -> None:
    """Show the host's states of a parameter, as views, beside what the user has put there."""
    state = shown.get(managed.tensor)
    names = (*engine.rule.states, MASTER)
    if not isinstance(state, HostViews) or not state:
        others = {key: value for key, value in (state or {}).items() if key not in names}
        state = shown[managed.tensor] = HostViews(managed.index, finisher(engine), others)
    for name in names:
        if (name == MASTER or name in managed.filled) and not state.shows(name):
            state.show(name, managed.segment.view(name, managed.index, managed.tensor.shape))
    state.count(managed.step)


def publish_all(engine: Engine, shown: Shown) -> None:
    """Of all parameters that have been updated."""
    for managed in engine.managed:
        if managed.step:
            publish(engine, shown, managed)


def load(engine: Engine, managed: Managed, saved: dict[str, Any] | None) -> None:
    """Copy a checked state into the host's arenas; None: as if it had never been updated.

    The master counts where it rounds to the weight that is in the model by the next step; elsewhere that weight does.
    """
    given = {} if saved is None else {name: value for name, value in saved.items() if value is not None}
    managed.filled = {name for name in engine.rule.states if name in given}
    managed.segment.have(engine.device, managed.filled)
    for name in managed.segment.arenas:
        view = managed.segment.view(name, managed.index, managed.tensor.shape)
        if name in given:
            view.copy_(given[name])
        elif name != MASTER:
            view.zero_()
    managed.step = 0 if saved is None else int(saved_step(saved))
    if saved is not None:
        managed.version = -1


def take_over_edits(engine: Engine, shown: Shown) -> None:
    """What was written into parameters becomes their master, and what into `state` their state.

    Raises before anything where that is impossible.
    """
    states = edited_states(engine.managed, shown, engine.rule)
    edited = [managed for managed in engine.managed if managed.is_edited]
    for managed in edited:
        managed.check(managed.tensor)
    for managed, state in states:
        load(engine, managed, state)
    for managed in dict.fromkeys([*edited, *(managed for managed, _ in states)]):
        refresh(engine, managed)


def refresh(engine: Engine, managed: Managed) -> None:
    """Take over what was written into a parameter: masters whose rounded value still stands keep their bits."""
    engine.way_up.land_all()
    engine.finish()
    master = managed.segment.view("master", managed.index, managed.tensor.shape)
    value = managed.tensor.detach().to(master.device)
    masters = [bucket.master for bucket in managed.buckets]
    engine.device.touch(f"refresh {managed.name}", reads=masters, writes=masters)
    changed = master.to(engine.config.wire_dtype or value.dtype).to(value.dtype) != value
    master[changed] = value[changed].float()
    managed.note()
