"""When updated values go to the parameters: at their own step, or, one step late, while the host updates the next.

A policy gets the updates of a step and says which ones are to be sent now. It knows nothing of how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zofftk.host_state import HostBucket
from zofftk.managed import Update


class Policy(Protocol):
    """`kept` are updates whose values are still to be sent, by bucket; `steps` counts the steps so far."""

    kept: dict[HostBucket, Update]
    steps: int

    @property
    def is_late(self) -> bool:
        """The coming update runs beside compute."""
        ...

    def exchange(self, updates: Sequence[Update]) -> list[Update]:
        """Those to send at this step, whose own are `updates`: none where it was skipped."""
        ...


class Synchronous:
    """Every step sends its own updates."""

    is_late = False

    def __init__(self) -> None:
        self.kept: dict[HostBucket, Update] = {}
        self.steps = 0

    def exchange(self, updates: Sequence[Update]) -> list[Update]:
        self.steps += 1
        return list(updates)


class Delayed:
    """After `delay_after` steps, each step sends the updates of the one before and keeps its own.

    Their values wait in the wire they were written to, while the next gradients arrive in the other.

    Source: ZeRO-Offload, section 5.2 (one-step delayed parameter update).
    """

    def __init__(self, delay_after: int) -> None:
        self.delay_after = delay_after
        self.kept: dict[HostBucket, Update] = {}
        self.steps = 0

    @property
    def is_late(self) -> bool:
        return self.steps >= self.delay_after

    def exchange(self, updates: Sequence[Update]) -> list[Update]:
        self.steps += 1
        if self.steps <= self.delay_after:
            return list(updates)
        late, self.kept = list(self.kept.values()), {update.bucket: update for update in updates}
        for bucket in self.kept:
            bucket.swap_wires()
        return late


def make_policy(update: str, delay_after: int) -> Policy:
    return Delayed(delay_after) if update == "delayed" else Synchronous()


def take_kept(policy: Policy) -> list[Update]:
    """The kept updates, which are kept no longer."""
    kept, policy.kept = policy.kept, {}
    return list(kept.values())


def forget_kept(policy: Policy, index: int) -> None:
    """The parameter's value is sent no more."""
    for update in policy.kept.values():
        update.present.discard(index)
    policy.kept = {bucket: update for bucket, update in policy.kept.items() if update.present}


def kept_params(policy: Policy) -> set[int]:
    """The parameters whose new value is on the host, and waits for the next step."""
    return {index for update in policy.kept.values() for index in update.present}


def check_saved_lateness(saved: Any, with_state: Sequence[bool]) -> None:
    """ValueError where `saved`, of the key `delayed`, is none; `with_state` says which parameters have a state."""
    if saved is None:
        return
    steps, late = (saved.get("steps"), saved.get("late")) if isinstance(saved, dict) else (None, None)
    known = {number for number, has_one in enumerate(with_state) if has_one}
    if not isinstance(steps, int) or not isinstance(late, list) or any(i not in known for i in late):
        raise ValueError(f"the saved entry 'delayed' is {saved!r}, expected its steps and late parameters")
