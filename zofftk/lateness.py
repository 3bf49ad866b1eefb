"""What the delayed update means to an optimizer: its policy, values that are late, and how they are saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from zofftk.device.base import HOST
from zofftk.engine import Engine
from zofftk.host_state import HostBucket
from zofftk.managed import Managed, Update
from zofftk.policies import Delayed, Policy, forget_kept, kept_params, make_policy, take_kept

logger = logging.getLogger("zofftk")


def flush(engine: Engine) -> None:
    """Send what is late to the parameters now."""
    engine.land_all()  # what was late before, of the same buckets
    check_edits(engine)
    note_loaded(engine)
    engine.exchange(take_kept(engine.policy))


def switch(engine: Engine, update: str, delay_after: int) -> None:
    """Another policy from the next step on; what is late is sent."""
    if update == "delayed":
        for segment in engine.segments:
            segment.have_spares(engine.device)
    flush(engine)
    steps = engine.policy.steps
    engine.policies[:] = [make_policy(update, delay_after)]
    engine.policy.steps = steps


def written_late(engine: Engine) -> list[Managed]:
    """The parameters that were written to while a new value of theirs is late.

    Where masters were loaded, the weights that belong to them may be, before or after.
    """
    late = [engine.managed[index] for index in sorted(kept_params(engine.policy))]
    return [managed for managed in late if managed.is_edited and not managed.is_loaded]


def check_edits(engine: Engine) -> None:
    """Raises where a parameter was written to whose new value is late: which of its elements, nobody knows."""
    for managed in written_late(engine):
        raise RuntimeError(
            f"{managed.name} was written to while a delayed update of it was under way: call flush() on the optimizer "
            "before writing, or refresh() now, which takes over all of its values and drops that update"
        )


def note_loaded(engine: Engine) -> None:
    """Weights that were loaded beside late masters are the ones before these, and stand until what is late is sent."""
    for index in kept_params(engine.policy):
        if (managed := engine.managed[index]).is_loaded:
            managed.check(managed.tensor)
            managed.note()


def let_edits_stand(engine: Engine) -> None:
    """At the end, what was written counts, and the late updates of those parameters are dropped."""
    written = written_late(engine)
    if written:
        others = f" and {len(written) - 1} more" if len(written) > 1 else ""
        logger.warning("%s%s: written to, so the delayed update under way is dropped", written[0].name, others)
    for managed in written:
        forget_kept(engine.policy, managed.index)


def warn_if_kept(policies: list[Policy]) -> None:
    """At the end of an optimizer that was not closed."""
    if policies[-1].kept:
        logger.warning("the last delayed update has not reached the parameters: call close() or flush() at the end")


# -- checkpoints -----------------------------------------------------------------------------------------------------


def state(engine: Engine, params: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    """Steps so far, and the positions of the parameters whose masters are one update ahead; None if never delayed."""
    kept = [engine.managed[index] for index in kept_params(engine.policy)]
    late = {id(managed.tensor) for managed in kept if managed.step}  # without a state, no master is saved
    if not isinstance(engine.policy, Delayed) and not late:
        return None
    return {"steps": engine.policy.steps, "late": [i for i, param in enumerate(params) if id(param) in late]}


def late_params(saved: dict[str, Any] | None, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of the optimizer's parameters those that were late when `saved` was made."""
    return [] if saved is None else [params[position] for position in saved["late"]]


def load(engine: Engine, saved: dict[str, Any] | None, params: Sequence[torch.Tensor]) -> None:
    """Forget what is late, and take over what was late when `saved` was made.

    It is sent at the next step, by any policy: until then the weights may be loaded too.
    """
    for index in kept_params(engine.policy):
        engine.managed[index].is_loaded = True  # its master is ahead of the weight
    take_kept(engine.policy)
    if saved is None:
        return
    engine.policy.steps = int(saved["steps"])
    tensors = {id(param) for param in late_params(saved, params)}
    late = {managed.index for managed in engine.managed if id(managed.tensor) in tensors}
    updates = [_kept_update(engine, bucket, late & bucket.pieces.keys()) for bucket in engine.buckets]
    engine.policy.kept = {update.bucket: update for update in updates if update.present}


def _kept_update(engine: Engine, bucket: HostBucket, present: set[int]) -> Update:
    """The values that the masters round to, where they would wait after a step."""
    if present and bucket.spare is None:
        engine.managed[min(present)].segment.have_spares(engine.device)
    wire = bucket.spare or bucket.wire
    if present:
        if wire in bucket.sent:
            engine.device.synchronize(bucket.sent[wire], f"sent: {bucket.label} must have left before it is loaded")
        engine.device.touch(f"load: {bucket.label}", reads=[bucket.master], writes=[wire])
    for index in present:
        piece = bucket.pieces[index]
        part = slice(piece.offset, piece.offset + piece.numel)
        wire.tensor[part].copy_(bucket.master.tensor[part])
        engine.managed[index].is_loaded = True
    return Update(bucket, present, wire, engine.device.record(HOST))
