"""What the engine holds and has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zofftk.engine import Engine


@dataclass(frozen=True)
class StepReport:
    """Sizes now, and totals over the steps so far.

    `wait_gradients_ms`, `adam_ms` and `copy_back_ms` are the main thread's time inside `step()`: until the last
    gradient and the norm were there, until updated values had arrived on the device, and copying them into the
    parameters. `adam_busy_ms` is how long the host stream computed, overlapped or not. (`adam` stands
    for the update, whichever optimizer's it is.)
    """

    num_params: int
    device_bytes: int  # of the parameters
    staging_bytes: int
    host_bytes: int  # of the states, the wires, the statistics and, where there are any, the fp32 totals
    steps: int
    bytes_down: int
    bytes_up: int
    wait_gradients_ms: float
    adam_ms: float
    adam_busy_ms: float
    copy_back_ms: float


def report_of(engine: Engine, steps: int) -> StepReport:
    engine.device.collect_spans()
    trace = engine.device.trace
    tensors = [managed.local for managed in engine.managed]
    return StepReport(
        num_params=sum(tensor.numel() for tensor in tensors),
        device_bytes=sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors),
        staging_bytes=engine.ring.nbytes,
        host_bytes=sum(segment.host_bytes for segment in engine.segments),
        steps=steps,
        bytes_down=engine.device.bytes_down,
        bytes_up=engine.device.bytes_up,
        wait_gradients_ms=trace.total_ms("main", "wait for gradients"),
        adam_ms=trace.total_ms("compute", "wait for values"),
        adam_busy_ms=trace.total_ms("host", engine.rule.name),
        copy_back_ms=trace.total_ms("compute", "copy back"),
    )
