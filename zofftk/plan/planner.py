"""`plan`: what a run will cost."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from zofftk.errors import InputError
from zofftk.plan.answer import Plan
from zofftk.plan.assumed import assumed_numbers
from zofftk.plan.beside import beside
from zofftk.plan.best import LIKELY, compare, complete, with_buckets, with_policies
from zofftk.plan.finding import find_source, said
from zofftk.plan.nearest import largest_micro_batch, largest_model, nearest_fitting
from zofftk.plan.setting import Setting
from zofftk.plan.sources import Source
from zofftk.plan.trials import Found, Trials
from zofftk.profile import Profile, load_profile, profile_path

NOT_IN_PROFILE = "a host's memory is taken to be free but for what is listed; the program itself takes some too"


def plan(
    model: str | Source,
    machine: str | os.PathLike[str] | Profile = "v100-dgx2",
    setting: Setting | None = None,
    *,
    searches: bool = True,
) -> Plan:
    """What training a model costs on a machine, by dry runs of the engine.

    Args:
        model: a preset's name, the path of a Hugging Face `config.json`, `module:function`, or a `Source`.
        machine: a profile, its name or the path of its file.
        setting: how it is trained; None: the source's default.
        searches: look for the largest micro-batch and model, and for the best setting, too.

    Raises:
        InputError: there is no such model or machine, or the model cannot be trained in this setting.

    Source: ZeRO-Offload, sections 3 to 5, for what is where and when; memory and times are those of `dry_run`.
    """
    started_s = time.perf_counter()
    source = find_source(model) if isinstance(model, str) else model
    profile = machine if isinstance(machine, Profile) else load_profile(machine)
    setting = setting or source.default
    check_setting(source, profile, setting)
    profile = profile.shared_by(setting.ranks * setting.tp)
    trials = Trials(source, profile)
    try:
        return _answer(trials, setting, _assumed(machine, source), searches, started_s)
    except Exception as error:
        if isinstance(error, InputError) or source.is_ours:
            raise
        raise InputError(
            f"model: {source.name}: a dry run of it, on tensors without values, failed: {said(error)}"
        ) from error


def check_setting(source: Source, profile: Profile, setting: Setting) -> None:
    """Raises InputError for what this model cannot do."""
    if setting.recompute and not source.can_recompute:
        raise InputError("recompute: expected a model with a list of layers that look alike")
    if setting.tp > 1 and not source.can_slice:
        raise InputError(f"tp: expected 1, only the layers of presets can be cut, got {setting.tp}")
    if source.max_seq is not None and setting.seq > source.max_seq:
        raise InputError(f"seq: expected at most {source.max_seq}, the longest the model knows, got {setting.seq}")
    if setting.tp > 1:
        for number, what in ((source.heads or 1, "heads"), (setting.seq, "tokens")):
            if number % setting.tp:
                raise InputError(f"tp: expected a divisor of the {number} {what}, got {setting.tp}")


def _assumed(machine: str | os.PathLike[str] | Profile, source: Source) -> tuple[str, ...]:
    numbers = [] if isinstance(machine, Profile) else assumed_numbers(profile_path(machine))
    return (*source.notes, *numbers, NOT_IN_PROFILE)


def _try_policies(trials: Trials, start: Setting) -> Found:
    """Most of what a comparison will ask for."""
    for each in with_policies(start):
        trials.step(each)
    if trials.source.can_recompute:
        trials.memory(replace(start, recompute=not start.recompute))
    return trials.found


def _answer(trials: Trials, setting: Setting, assumed: tuple[str, ...], searches: bool, started_s: float) -> Plan:
    memory = trials.memory(setting)
    nearest = None if memory.fits else nearest_fitting(trials, setting)
    step = micro_batch = layers = found = None
    start = setting if memory.fits else nearest.setting if nearest and nearest.layers is None else None
    if not searches:
        step = trials.step(setting) if memory.fits else None
    elif start is None:
        layers = largest_model(trials, setting)
    else:
        with beside(lambda: _try_policies(trials, start)) as others:
            micro_batch = largest_micro_batch(trials, setting)
            layers = largest_model(trials, setting)
            for each in with_buckets(replace(start, policy=LIKELY)):
                trials.step(each)
            trials.know(others())
        found = complete(trials, start, compare(trials, start), micro_batch if memory.fits else None)
        step = trials.step(setting) if memory.fits else None
    return Plan(
        model=trials.source.name,
        machine=trials.profile.name,
        setting=setting,
        layers=trials.source.layers,
        num_params=trials.num_params(),
        memory=memory,
        step=step,
        largest_micro_batch=micro_batch,
        largest_layers=layers,
        largest_params=None if layers is None else trials.num_params(layers),
        nearest=nearest,
        best=found and found.best,
        best_reasons=tuple(found.reasons) if found else (),
        compared=tuple(found.compared) if found else (),
        assumed=assumed,
        seconds=time.perf_counter() - started_s,
    )
