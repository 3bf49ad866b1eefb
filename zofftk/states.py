"""Between `optimizer.state`, the parameters and the host's arenas: what is shown of these, and what is taken over."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

import torch

from zofftk.engine import Engine
from zofftk.host_views import HostViews, edited_states, finisher
from zofftk.lateness import check_edits
from zofftk.managed import Managed
from zofftk.mapped import FileMappings
from zofftk.policies import forget_kept, kept_params
from zofftk.ranks.slices import is_sliced, slice_box
from zofftk.rules.base import Rule
from zofftk.state_dict import MASTER, saved_step

Shown = MutableMapping[torch.Tensor, Any]  # `optimizer.state`


def publish(engine: Engine, rule: Rule, shown: Shown, managed: Managed, *, all_of: bool = False) -> None:
    """Show the host's states of a parameter, as views, beside what the user has put there; `all_of`: empty ones too."""
    state = shown.get(managed.tensor)
    if not isinstance(state, HostViews) or not state:
        own = {"step", MASTER, *rule.states}
        others = {} if state is None else {key: value for key, value in state.items() if key not in own}
        state = HostViews(managed.index, finisher(engine), step=torch.zeros((), dtype=torch.float32))
        _show(engine, rule, state, managed, managed.filled)
        for key, value in others.items():
            state[key] = value
        shown[managed.tensor] = state
    _show(engine, rule, state, managed, managed.segment.arenas.keys() if all_of else managed.filled)
    state.count(managed.step)


def _show(engine: Engine, rule: Rule, state: HostViews, managed: Managed, names: Collection[str]) -> None:
    for name in (*rule.states, MASTER):
        if (name == MASTER or name in names) and not state.shows(name):
            state.show(name, shown_state(managed, name, engine.config.rank_timeout_s))


def shown_state(managed: Managed, name: str, timeout_s: float | None = None) -> torch.Tensor:
    """A state in the shape of the parameter, as a view of the host's memory; over ranks, a `ShardedState`."""
    parts, within = managed.segment.parts(name, managed.index), slice_box(managed.tensor)
    if managed.segment.num_ranks == 1 and within is None:
        ((_, flat),) = parts
        return flat.view(managed.local.shape)
    if any(part.is_meta for _, part in parts):
        return torch.empty(managed.shape, dtype=torch.float32, device="meta")  # a dry run has none to share
    from zofftk.sharding.state import ShardedState  # torch's checkpoints take long to import

    options: dict[str, Any] = {"within": within, "is_copy": managed.is_copy, "timeout_s": timeout_s}
    return ShardedState(managed.shape, torch.float32, parts, **options)


def publish_all(engine: Engine, rule: Rule, shown: Shown) -> None:
    """Of all parameters that have been updated."""
    for managed in engine.managed:
        if managed.step:
            publish(engine, rule, shown, managed)


def load(
    engine: Engine, rule: Rule, managed: Managed, saved: dict[str, Any] | None, files: FileMappings | None = None
) -> None:
    """Copy a checked state into the host's arenas; None: as if it had never been updated.

    The master counts where it rounds to the weight that is in the model by the next step; elsewhere that weight does.
    """
    given = {} if saved is None else {name: saved[name] for name in saved if saved[name] is not None}
    managed.filled = {name for name in rule.states if name in given}
    managed.segment.have(engine.device, managed.filled)
    written = [each for bucket in managed.buckets for each in (bucket.master, *bucket.moments.values())]
    engine.device.touch(f"load the state of {managed.name}", writes=written)
    for name in managed.segment.arenas:
        view = shown_state(managed, name)
        if name in given:
            _copy(view, given[name], files or FileMappings())
        elif name != MASTER:
            view.zero_()
    managed.step = 0 if saved is None else int(saved_step(saved))
    managed.is_loaded = managed.is_loaded or saved is not None


def _copy(view: torch.Tensor, value: torch.Tensor, files: FileMappings) -> None:
    if is_sliced(value):  # of torch's own optimizer, on the same mesh or another
        value = value.full_tensor()  # type: ignore[attr-defined]
    if hasattr(value, "parts"):  # a `ShardedState`, of this optimizer or one that shares in the same way
        view.copy_(value)
    elif hasattr(view, "read_from"):
        view.read_from(value, files)  # type: ignore[attr-defined]
    else:
        files.copy(view, value)


def take_over_edits(engine: Engine, rule: Rule, shown: Shown, *, at_step: bool) -> None:
    """What was written into parameters becomes their master, and what into `state` their state.

    Raises before anything where that is impossible. A loaded master is held against the weight at a step alone: the
    weights may be loaded after it.
    """
    edited_here = edited_states(engine.managed, shown, rule)
    edited, late, kept = [], [], kept_params(engine.policy)
    for managed in engine.managed:
        is_late = managed.index in kept
        if managed.is_loaded and at_step and is_late:
            managed.note()  # the weight is the one before the master's
        elif at_step if managed.is_loaded else managed.is_edited:
            (late if is_late else edited).append(managed)
    if at_step:
        check_edits(late)
    for managed in edited:
        managed.check(managed.tensor)
    if edited_here:
        engine.finish()  # the update of the step before may still be running
    for managed, state in edited_here:
        load(engine, rule, managed, state)
    loaded = [managed for managed, state in edited_here if state is not None and at_step]
    for managed in dict.fromkeys([*edited, *loaded]):
        refresh(engine, managed)


def refresh(engine: Engine, managed: Managed, *, anew: bool = False) -> None:
    """Take over what was written into a parameter: masters whose rounded value still stands keep their bits.

    With `anew`, none does. An update of it that is late is dropped: its value would be written over what is taken over.
    """
    forget_kept(engine.policy, managed.index)
    engine.land_all()
    engine.finish()
    masters = [bucket.master for bucket in managed.buckets]
    engine.device.touch(f"refresh {managed.name}", reads=masters, writes=masters)
    whole = managed.local.detach().reshape(-1)
    for start, master in managed.segment.parts(MASTER, managed.index):
        value = whole[start : start + master.numel()].to(master.device)
        changed = master.to(engine.config.wire_dtype or value.dtype).to(value.dtype) != value
        if anew:
            changed.fill_(True)
        master[changed] = value[changed].float()
    managed.note()
