"""A happens-before clock: turns a missing wait into an error that names both operations.

Each actor (the host's main thread, the compute stream, each copy stream, the host stream) has a vector clock. An
operation on a stream happens after what the main thread had seen when it enqueued it, after the stream's earlier
operations, and after the events the stream waited for; the main thread happens after a stream only where it
synchronised with it. The check is made while enqueueing, so it does not depend on how fast anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MAIN = "main"  # the actor that enqueues; compute is another one even where one thread runs both

Snapshot = dict[str, int]


class RaceError(RuntimeError):
    """An operation touches a buffer without having waited for an earlier operation on it."""


@dataclass(frozen=True)
class Access:
    """One earlier use of a buffer: who, when on that actor's clock, and in which operation."""

    actor: str
    time: int
    operation: str


@dataclass
class BufferClock:
    """The uses of one buffer that a later operation may have to wait for."""

    name: str
    last_write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)  # since that write, the last one of each actor


class RaceClock:
    def __init__(self) -> None:
        self._clocks: dict[str, Snapshot] = {MAIN: {}}

    def operation(
        self, actor: str, operation: str, reads: Iterable[BufferClock] = (), writes: Iterable[BufferClock] = ()
    ) -> None:
        """Advance `actor` by one operation and check what it touches; RaceError if a wait is missing."""
        clock = self._clocks.setdefault(actor, {})
        if actor != MAIN:
            _join(clock, self._clocks[MAIN])  # nothing runs before it was enqueued
        clock[actor] = clock.get(actor, 0) + 1
        access = Access(actor, clock[actor], operation)
        for buffer in reads:
            _check(clock, access, "reads", buffer, buffer.last_write, "written")
        for buffer in writes:
            _check(clock, access, "writes", buffer, buffer.last_write, "written")
            for earlier in buffer.reads.values():
                _check(clock, access, "writes", buffer, earlier, "read")
        for buffer in reads:
            buffer.reads[actor] = access
        for buffer in writes:
            buffer.last_write = access
            buffer.reads = {}

    def record(self, actor: str) -> Snapshot:
        """What has happened before this point of `actor`, for an event."""
        return dict(self._clocks.get(actor, {}))

    def wait(self, actor: str, snapshot: Snapshot) -> None:
        """`actor` goes on only after everything in `snapshot` has happened."""
        _join(self._clocks.setdefault(actor, {}), snapshot)


def _join(clock: Snapshot, other: Snapshot) -> None:
    for actor, time in other.items():
        if time > clock.get(actor, 0):
            clock[actor] = time


def _check(clock: Snapshot, access: Access, verb: str, buffer: BufferClock, earlier: Access | None, done: str) -> None:
    if earlier is None or earlier.actor == access.actor or clock.get(earlier.actor, 0) >= earlier.time:
        return
    raise RaceError(
        f"'{access.operation}' on {access.actor} {verb} {buffer.name}, which '{earlier.operation}' on {earlier.actor} "
        f"has {done}, without having waited for it"
    )
