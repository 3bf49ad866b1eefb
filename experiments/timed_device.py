"""The emulated device with a clock on everything: copies at a link's bandwidth, Adam at a host's speed.

Compute is paced by `Pace`: a layer runs its math and then sleeps to the end of its emulated time, so that it takes no
host cores from the rest. Adam is timed, not real: its task sleeps for as long as the given host would take.
"""

import time
from collections.abc import Callable, Sequence

from zofftk.device.base import Buffer
from zofftk.device.emulated import EmulatedDevice


class TimedDevice(EmulatedDevice):
    """`down_gb_s` and `up_gb_s` cap the copies, `adam_params_per_s` sets the speed of the update."""

    def __init__(self, *, down_gb_s: float, up_gb_s: float, adam_params_per_s: float, keep_spans: bool = False) -> None:
        super().__init__(down_gb_s=down_gb_s, up_gb_s=up_gb_s, keep_spans=keep_spans)
        self._adam_params_per_s = adam_params_per_s

    def host_task(
        self,
        label: str,
        task: Callable[[], None],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        updates: int = 0,
    ) -> None:
        if label.startswith("adam"):
            seconds = writes[0].tensor.numel() / self._adam_params_per_s
            super().host_task(label, lambda: time.sleep(seconds), reads=reads, writes=writes, updates=updates)
        else:
            super().host_task(label, task, reads=reads, writes=writes, updates=updates)


class Pace:
    """The time line of an emulated compute stream: operations follow one another without gaps."""

    def __init__(self) -> None:
        self._end_s = 0.0

    def start(self) -> None:
        """The stream is idle until now."""
        self._end_s = time.perf_counter()

    def finish_after(self, seconds: float) -> None:
        """Sleep to the end of an operation of `seconds` that began where the one before ended."""
        self._end_s += seconds
        time.sleep(max(0.0, self._end_s - time.perf_counter()))
