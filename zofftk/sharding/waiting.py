"""How long ranks wait for one another where they save, load or gather: as long as the optimizers in it do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zofftk.sharding.state import ShardedState


def timeout_for(state: Any, given: float | None) -> float | None:
    """`given`, else the shortest `rank_timeout_s` of the optimizers in `state`, or of those whose states are in it."""
    if given is None:
        return min(_timeouts(state), default=None)
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise ValueError(f"timeout_s must be a positive number of seconds, or None, got {given!r}")
    return given


def _timeouts(value: Any) -> list[float]:
    if isinstance(value, Mapping):
        return [timeout for item in value.values() for timeout in _timeouts(item)]
    if isinstance(value, list):
        return [timeout for item in value for timeout in _timeouts(item)]
    timeout = value.timeout_s if isinstance(value, ShardedState) else getattr(value, "rank_timeout_s", None)
    return [timeout] if isinstance(timeout, int | float) else []
