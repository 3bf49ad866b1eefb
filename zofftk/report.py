"""What the engine holds and has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """Sizes now, and totals over the steps so far.

    `wait_gradients_ms`, `adam_ms` and `copy_back_ms` are the main thread's time inside `step()`: until the last
    gradient and the norm were there, until updated values had arrived on the device, and copying them into the
    parameters. `adam_busy_ms` is how long the host stream computed, overlapped or not.
    """

    num_params: int
    device_bytes: int  # of the parameters
    staging_bytes: int
    host_bytes: int
    steps: int
    bytes_down: int
    bytes_up: int
    wait_gradients_ms: float
    adam_ms: float
    adam_busy_ms: float
    copy_back_ms: float
