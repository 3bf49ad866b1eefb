"""What the delayed update means to an optimizer: its policy, values that are late, and how they are saved."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from zofftk.device.base import HOST
from zofftk.engine import Engine
from zofftk.host_state import HostBucket
from zofftk.managed import Managed, Update
from zofftk.policies import Delayed, Policy, kept_params, make_policy, take_kept
from zofftk.ranks.one import FLUSH, SWITCH

logger = logging.getLogger("zofftk")


def flush(engine: Engine) -> None:
    """Send what is late to the parameters now."""
    engine.land_all()
    if engine.ranks.size > 1 and engine.policy.kept:
        engine.meet(FLUSH)
    late = [engine.managed[index] for index in kept_params(engine.policy)]
    for managed in late:
        if managed.is_loaded:
            managed.note()  # the weight is the one before the master's
    check_edits([managed for managed in late if managed.is_edited])
    engine.exchange(take_kept(engine.policy))


def switch(engine: Engine, update: str, delay_after: int) -> None:
    """Another policy from the next step on; what is late is sent."""
    if engine.ranks.size > 1:
        engine.meet(SWITCH)
    if update == "delayed":
        for segment in engine.segments:
            segment.have_spares(engine.device)
    flush(engine)
    steps = engine.policy.steps
    engine.policies[:] = [make_policy(update, delay_after)]
    engine.policy.steps = steps


def check_edits(late: Sequence[Managed]) -> None:
    """Raises where a parameter was written to whose new value is late: which of its elements, nobody knows."""
    if late:
        raise RuntimeError(
            f"{late[0].name} was written to while a delayed update of it was under way: call flush() on the optimizer "
            "before writing, or refresh() now, which takes over all of its values and drops that update"
        )


def warn_if_kept(policies: list[Policy], pid: int) -> None:
    """At the end of an optimizer that was not closed, in the process `pid` that has built it: not in its forks."""
    if policies[-1].kept and os.getpid() == pid:
        logger.warning("the last delayed update has not reached the parameters: call close() or flush() at the end")


# -- checkpoints -----------------------------------------------------------------------------------------------------


def state(engine: Engine, params: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    """Steps so far, and the positions of the parameters whose masters are one update ahead; None if never delayed.

    Not of those that were written to since: what was written counts, as after `refresh()`. Nor of those whose state
    was deleted: no master of theirs is saved.
    """
    kept = [engine.managed[index] for index in kept_params(engine.policy)]
    if not isinstance(engine.policy, Delayed) and not kept:
        return None
    late = {id(one.tensor) for one in kept if one.step and (one.is_loaded or not one.is_edited)}
    return {"steps": engine.policy.steps, "late": [i for i, param in enumerate(params) if id(param) in late]}


def trained_or_late(saved: dict[str, Any] | None, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Without the frozen ones, but for those that were late when `saved` was made: these still get that value."""
    late = set() if saved is None else saved["late"]
    return [param for position, param in enumerate(params) if param.requires_grad or position in late]


def load(engine: Engine, saved: dict[str, Any] | None, params: Sequence[torch.Tensor]) -> None:
    """Forget what is late, and take over what was late when `saved` was made: it comes with the next step.

    Under each policy: the weights of that time may be loaded afterwards.
    """
    take_kept(engine.policy)
    if saved is None:  # of a run that was not delayed
        engine.policy.steps = max((managed.step for managed in engine.managed), default=0)
        return
    engine.policy.steps = int(saved["steps"])
    tensors = {id(params[position]) for position in saved["late"]}
    late = {managed.index for managed in engine.managed if id(managed.tensor) in tensors}
    for segment in {id(engine.managed[index].segment): engine.managed[index].segment for index in late}.values():
        segment.have_spares(engine.device)
    updates = [_kept_update(engine, bucket, late & bucket.params) for bucket in engine.buckets]
    engine.policy.kept = {update.bucket: update for update in updates if update.present}


def _kept_update(engine: Engine, bucket: HostBucket, present: set[int]) -> Update:
    """The values that the masters round to, where they would wait after a step."""
    wire = bucket.spare or bucket.wire  # a spare, where there is anything to keep
    if present:
        if (sent := bucket.sent.get(wire)) is not None:
            engine.device.synchronize(sent, f"load: what was late in {bucket.label} must have left")
        engine.device.touch(f"load: {bucket.label}", reads=[bucket.master], writes=[wire])
    for piece in bucket.pieces_of(present):
        part = slice(piece.offset, piece.offset + piece.numel)
        wire.tensor[part].copy_(bucket.master.tensor[part])
    for index in present:
        engine.managed[index].is_loaded = True
    return Update(bucket, present, wire, engine.device.record(HOST))
