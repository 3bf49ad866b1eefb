"""The race clock finds a missing wait and names both operations."""

from __future__ import annotations

import pytest

from zofftk.device.clock import MAIN, BufferClock, RaceClock, RaceError


def test_a_read_needs_the_writers_event():
    clock, slot = RaceClock(), BufferClock("slot 0")
    clock.operation("compute", "pack", writes=[slot])
    with pytest.raises(RaceError, match=r"'down' on down reads slot 0, which 'pack' on compute has written"):
        clock.operation("down", "down", reads=[slot])
    clock.wait("down", clock.record("compute"))
    clock.operation("down", "down", reads=[slot])


def test_a_write_needs_the_readers_event():
    clock, slot = RaceClock(), BufferClock("slot 0")
    clock.operation("compute", "pack", writes=[slot])
    clock.wait("down", clock.record("compute"))
    clock.operation("down", "down", reads=[slot])
    with pytest.raises(RaceError, match=r"'pack again' on compute writes slot 0, which 'down' on down has read"):
        clock.operation("compute", "pack again", writes=[slot])
    clock.wait("compute", clock.record("down"))
    clock.operation("compute", "pack again", writes=[slot])


def test_an_event_recorded_too_early_does_not_help():
    clock, slot = RaceClock(), BufferClock("slot 0")
    early = clock.record("compute")
    clock.operation("compute", "pack", writes=[slot])
    clock.wait("down", early)
    with pytest.raises(RaceError):
        clock.operation("down", "down", reads=[slot])


def test_order_is_transitive_over_streams():
    clock, wire = RaceClock(), BufferClock("wire")
    clock.operation("down", "down", writes=[wire])
    clock.wait("host", clock.record("down"))
    clock.wait("up", clock.record("host"))
    clock.operation("up", "up", reads=[wire])


def test_main_and_compute_are_two_actors():
    clock, state = RaceClock(), BufferClock("state")
    clock.operation(MAIN, "fill", writes=[state])
    clock.operation("compute", "read", reads=[state])  # enqueueing orders compute after main
    clock.operation("compute", "write", writes=[state])
    with pytest.raises(RaceError, match="on main reads state"):
        clock.operation(MAIN, "look", reads=[state])  # only a synchronise orders main after compute
    clock.wait(MAIN, clock.record("compute"))
    clock.operation(MAIN, "look", reads=[state])
