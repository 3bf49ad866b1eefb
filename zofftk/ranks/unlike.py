"""Ranks with unlike gradients: what is dropped on one of them must not stay in another's share of the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zofftk.managed import Gathered

if TYPE_CHECKING:
    from zofftk.engine import Engine


def forget_dropped(engine: Engine, this_round: int) -> None:
    """Forget what `model.zero_grad()` has dropped, before gradients of others are added to this rank's share of it."""
    for managed in engine.managed:
        is_old = managed.gathered is Gathered.LIVE and managed.round != this_round
        if is_old and managed.tensor.grad is None:
            engine.forget_gathered(managed)
            engine.renew(managed.index)


def keep_elsewhere(engine: Engine) -> list[int]:
    """After a step that was skipped: gradients that only other ranks have brought are this rank's as well, so that a
    parameter has one on every rank or on none. Their indices."""
    kept = [managed for managed in engine.managed if managed.elsewhere]
    for managed in kept:
        managed.gathered, managed.elsewhere = Gathered.LIVE, False
        engine.outstanding[managed.index] = 1
    return [managed.index for managed in kept]
