"""A device without data, on a clock of its own: the engine's schedule, dry-run in one thread.

Every stream has a time, in whole nanoseconds. An operation begins when the stream, what it waits for, and the thread
that enqueues it are all there, and takes as long as `durations` says. Where the streams share the cores, it begins when
all that was enqueued before it is done as well: in which order they take turns changes little of when all is done.
Buffers are meta tensors; the machine adds up what they would take. A value it is asked for is `answer`, in every
element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from zofftk.device.base import COMM, COMPUTE, HOST, Buffer, Device, Event, Place, Placement, Run, StreamName, Work

MAIN_LANE = "main"


class DurationsOf(Protocol):
    """How long each operation takes, in ns."""

    @property
    def shares_cores(self) -> bool: ...

    def copy_ns(self, stream: StreamName, nbytes: int, copies: int) -> int: ...
    def move_ns(self, nbytes: int) -> int: ...
    def host_ns(self, work: Work) -> int: ...
    def collective_ns(self, nbytes: int, parts: int) -> int: ...


class VirtualDevice(Device):
    """See the module.

    Args:
        durations: of the machine that it stands for.
        keep_spans: keep a span of every operation, in virtual time, for `trace.write`.
        answer: what every element of a value is that the engine looks at, such as a norm.

    `allocated_bytes` counts what buffers take by place, `named_bytes` by place and name; `locked_bytes` is the
    page-locked part of the host's;
    `bytes_between` is what this rank has sent to others; `busy_ns` is how long each stream has worked.
    """

    def __init__(self, durations: DurationsOf, *, keep_spans: bool = False, answer: float = 1.0) -> None:
        super().__init__(keep_spans=keep_spans)
        self._durations = durations
        self._answer = answer
        self._main_ns = self._cores_ns = 0
        self._free_ns: Counter[str] = Counter()  # when each stream has done what was enqueued on it
        self._model: _ModelSpan | None = None
        self.allocated_bytes: Counter[Place] = Counter()
        self.named_bytes: Counter[tuple[Place, str]] = Counter()
        self.locked_bytes = 0
        self.bytes_between = 0
        self.busy_ns: Counter[str] = Counter()

    # -- time --------------------------------------------------------------------------------------------------

    def now_ns(self, stream: StreamName) -> int:
        """When everything enqueued on `stream` so far is done."""
        return max(self._free_ns[stream], self._main_ns)

    def compute(self, label: str, duration_ns: int) -> None:
        """The model's own work on compute; what follows without a gap under the same label becomes one span."""
        start, stop = self._occupy(COMPUTE, duration_ns)
        if self._model is not None and (self._model.label, self._model.stop_ns) == (label, start):
            self._model.stop_ns = stop
        else:
            self._end_model_span()
            self._model = _ModelSpan(label, start, stop)

    def stand_still(self, stream: StreamName, label: str, duration_ns: int) -> None:
        """The stream does nothing for so long, such as while others use what it would."""
        self._run(stream, label, duration_ns)

    def _end_model_span(self) -> None:
        if self._model is not None:
            model, self._model = self._model, None
            self.trace.add(COMPUTE, model.label, model.start_ns / 1e9, model.stop_ns / 1e9)

    def _run(self, stream: StreamName, label: str, duration_ns: int, nbytes: int = 0) -> None:
        if stream == COMPUTE:
            self._end_model_span()
        start, stop = self._occupy(stream, duration_ns)
        self.trace.add(stream, label, start / 1e9, stop / 1e9, nbytes)

    def _occupy(self, stream: StreamName, duration_ns: int) -> tuple[int, int]:
        """From when to when the stream does its next work."""
        start = self.now_ns(stream)
        if self._durations.shares_cores:
            start = max(start, self._cores_ns)
        stop = self._free_ns[stream] = self._cores_ns = start + duration_ns
        self.busy_ns[stream] += duration_ns
        return start, stop

    def collect_spans(self) -> None:
        self._end_model_span()

    # -- memory ------------------------------------------------------------------------------------------------

    def buffer(
        self, name: str, numel: int, dtype: torch.dtype, place: Place, *, zero: bool = False, on_link: bool = False
    ) -> Buffer:
        self.named_bytes[place, name] += numel * dtype.itemsize
        return super().buffer(name, numel, dtype, place, zero=zero, on_link=on_link)

    def _allocate(self, numel: int, dtype: torch.dtype, place: Place, zero: bool, on_link: bool) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        self.allocated_bytes[place] += nbytes
        if on_link and place == "host":
            self.locked_bytes += nbytes
        with _disable_current_modes():  # the model's operations may be looked at meanwhile
            return torch.empty(numel, dtype=dtype, device="meta")

    # -- order -------------------------------------------------------------------------------------------------

    def _record(self, stream: StreamName) -> int:
        return self.now_ns(stream)

    def _wait(self, stream: StreamName, event: Event, why: str) -> None:
        start = self.now_ns(stream)
        if stream == COMPUTE:
            self._end_model_span()
            self.trace.add(COMPUTE, why, start / 1e9, max(start, event.handle) / 1e9)
        self._free_ns[stream] = max(start, event.handle)

    def _synchronize(self, event: Event, why: str) -> None:
        start, self._main_ns = self._main_ns, max(self._main_ns, event.handle)
        self.trace.add(MAIN_LANE, why, start / 1e9, self._main_ns / 1e9)

    # -- operations --------------------------------------------------------------------------------------------

    def _pack(
        self, label: str, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer, square_sums: Buffer
    ) -> None:
        self._run(COMPUTE, label, self._durations.move_ns(moved_bytes(placement, tensors, dst)))

    def _copy_back(self, label: str, src: Buffer, placement: Placement, tensors: Sequence[torch.Tensor]) -> None:
        self._run(COMPUTE, label, self._durations.move_ns(moved_bytes(placement, tensors, src)))
        torch.autograd.graph.increment_version(tensors)

    def _copy(self, stream: StreamName, label: str, dst: Buffer, src: Buffer, runs: Sequence[Run], nbytes: int) -> None:
        self._run(stream, label, self._durations.copy_ns(stream, nbytes, len(runs)), nbytes)

    def _zero(self, label: str, dst: Buffer) -> None:
        self._run(COMPUTE, label, self._durations.move_ns(dst.nbytes))

    def _open_comm(self) -> None:
        return None

    def _sized_collective(self, label: str, operation: Callable[[], None], dst: Buffer, src: Buffer) -> None:
        whole, part = sorted((dst, src), key=lambda buffer: buffer.tensor.numel(), reverse=True)
        parts = whole.tensor.numel() // max(1, part.tensor.numel())
        sent = whole.nbytes * (parts - 1) // parts
        self.bytes_between += sent
        self._run(COMM, label, self._durations.collective_ns(whole.nbytes, parts), sent)

    def _sized_host_task(self, label: str, task: Callable[[], None], work: Work) -> None:
        self._run(HOST, label, self._durations.host_ns(work))

    def _collective(self, label: str, operation: Callable[[], None]) -> None:
        raise AssertionError("its length is known from its buffers alone")

    def _host_task(self, label: str, task: Callable[[], None]) -> None:
        raise AssertionError("its length is known from its work alone")

    # -- what the main thread looks at -------------------------------------------------------------------------

    def _value(self, buffer: Buffer) -> np.ndarray:
        return np.full(buffer.tensor.numel(), self._answer)

    def _load(self, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer) -> None:
        return None

    def close(self) -> None:
        self._end_model_span()


class _ModelSpan:
    """Work of the model that is still going on."""

    def __init__(self, label: str, start_ns: int, stop_ns: int) -> None:
        self.label, self.start_ns, self.stop_ns = label, start_ns, stop_ns


def moved_bytes(placement: Placement, tensors: Sequence[torch.Tensor], flat: Buffer) -> int:
    """What moving the pieces between their tensors and a flat buffer reads and writes."""
    pieces = zip(placement.pieces, tensors, strict=True)
    return sum(piece.numel * (tensor.dtype.itemsize + flat.itemsize) for piece, tensor in pieces)
