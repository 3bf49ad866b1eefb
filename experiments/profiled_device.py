"""The emulated device as a GPU of a profile: every operation does its real work, then lasts as long as it would.

Durations are those of the virtual device, so that both stand for the same machine and differ in what is real here: the
data, the threads, the waits between them, and the time that Python takes. As on a GPU, compute is a stream like the
others, and the caller runs ahead of it. The model's own math is the caller's, however: it must not read parameters,
whose new values come later, and tells how long it takes (`compute`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from zofftk.device import host_kernels
from zofftk.device.base import COMPUTE, DOWN, HOST, UP, Buffer, Event, Placement, Run, StreamName, Work
from zofftk.device.emulated import EmulatedDevice
from zofftk.device.virtual import DurationsOf, moved_bytes


class ProfiledDevice(EmulatedDevice):
    """One device without ranks beside it. It keeps no spans: the emulated device's own end with the real work."""

    def __init__(self, durations: DurationsOf) -> None:
        self._durations = durations
        self._lines: dict[StreamName, _Line] = {stream: _Line() for stream in (COMPUTE, DOWN, UP, HOST)}
        super().__init__()
        self._start_lane(COMPUTE)

    # -- time --------------------------------------------------------------------------------------------------

    def compute(self, label: str, duration_ns: int) -> None:
        """The model's own work, whose math the caller has just done."""
        self._last(COMPUTE, duration_ns)

    def finish(self) -> None:
        """Block until compute has done what it was given."""
        self.synchronize(self.record(COMPUTE), "finish: compute must be idle")

    def _last(self, stream: StreamName, duration_ns: int) -> None:
        """What was enqueued on the stream just now takes so long."""
        line, enqueued_ns = self._lines[stream], time.perf_counter_ns()

        def last() -> None:
            line.not_before(enqueued_ns)
            line.last(duration_ns)

        self._enqueue(stream, last)

    # -- order -------------------------------------------------------------------------------------------------

    def _record(self, stream: StreamName) -> _Moment:
        moment = _Moment()
        self._enqueue(stream, moment.happen, always=True)
        return moment

    def _wait(self, stream: StreamName, event: Event, why: str) -> None:
        line, moment = self._lines[stream], event.handle

        def begin() -> None:
            moment.wait()
            line.not_before(moment.at_ns)

        self._enqueue(stream, begin, always=True)

    # -- operations --------------------------------------------------------------------------------------------

    def _pack(
        self, label: str, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer, square_sums: Buffer
    ) -> None:
        self._enqueue(COMPUTE, lambda: host_kernels.pack(placement, tensors, dst.tensor, square_sums.tensor))
        self._last(COMPUTE, self._durations.move_ns(moved_bytes(placement, tensors, dst)))

    def _copy_back(self, label: str, src: Buffer, placement: Placement, tensors: Sequence[torch.Tensor]) -> None:
        torch.autograd.graph.increment_version(tensors)  # now: the engine looks at versions when it has enqueued this
        same = [tensor.data for tensor in tensors]  # with versions of their own, for what moves later
        self._enqueue(COMPUTE, lambda: host_kernels.copy_back(src.tensor, placement, same))
        self._last(COMPUTE, self._durations.move_ns(moved_bytes(placement, tensors, src)))

    def _zero(self, label: str, dst: Buffer) -> None:
        def zero() -> None:
            dst.tensor.zero_()

        self._enqueue(COMPUTE, zero)
        self._last(COMPUTE, self._durations.move_ns(dst.nbytes))

    def _copy(self, stream: StreamName, label: str, dst: Buffer, src: Buffer, runs: Sequence[Run], nbytes: int) -> None:
        super()._copy(stream, label, dst, src, runs, nbytes)
        self._last(stream, self._durations.copy_ns(stream, nbytes, len(runs)))

    def _sized_host_task(self, label: str, task: Callable[[], None], work: Work) -> None:
        super()._sized_host_task(label, task, work)
        self._last(HOST, self._durations.host_ns(work))


class _Line:
    """When a stream has done what it was given. What follows begins there, not where a sleep ended too late."""

    def __init__(self) -> None:
        self._end_ns = 0

    def not_before(self, start_ns: int) -> None:
        self._end_ns = max(self._end_ns, start_ns)

    def last(self, duration_ns: int) -> None:
        """Sleep to the end of an operation of this length."""
        self._end_ns += duration_ns
        time.sleep(max(0, self._end_ns - time.perf_counter_ns()) / 1e9)


class _Moment(threading.Event):
    """An event that knows when it happened: whoever waits for it may wake up late."""

    at_ns = 0

    def happen(self) -> None:
        self.at_ns = time.perf_counter_ns()
        self.set()
