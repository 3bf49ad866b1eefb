"""Memory that this process holds now, and held at most, as the kernel counts it (Linux)."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """Now; None where the system does not tell."""
    return _entry("VmRSS")


def peak_bytes() -> int | None:
    """At most since `forget_peak`; getrusage's would include what the parent held when it forked."""
    return _entry("VmHWM")


def forget_peak() -> bool:
    """The peak counts from now; says whether the system allows it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _entry(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":")), None)
