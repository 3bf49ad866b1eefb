"""Ranks with unlike gradients: what is dropped on one of them must not stay in another's share of the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zofftk.managed import Gathered

if TYPE_CHECKING:
    from zofftk.engine import Engine


def forget_dropped(engine: Engine) -> None:
    """Forget what `model.zero_grad()` has dropped, before gradients of others are added to this rank's share of it."""
    for managed in engine.managed:
        is_old = managed.gathered is Gathered.LIVE and managed.round != engine.ranks.rounds
        if is_old and managed.tensor.grad is None:
            engine.forget_gathered(managed)
            engine.renew(managed.index)


def share_kept(engine: Engine) -> list[int]:
    """After a step that was skipped: what any rank has brought, all have, so that a parameter has a gradient on every
    rank or on none, and is dropped by all. Returns the indices of those that are new here."""
    kept = [managed for managed in engine.managed if managed.is_live]
    new = [managed.index for managed in kept if managed.elsewhere]
    for managed in kept:
        managed.gathered, managed.elsewhere, managed.round = Gathered.LIVE, False, engine.ranks.met - 1
        engine.outstanding[managed.index] = 1
    return new
