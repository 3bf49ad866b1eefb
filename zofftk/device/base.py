"""The contract between the engine's schedule and a machine: five streams, events, buffers and a few operations.

The engine calls the public methods from one thread. Each of them tells the race clock what it touches, counts the
bytes it moves, and hands the work to the machine. A machine implements the methods that begin with an underscore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from zofftk.device.clock import MAIN, BufferClock, RaceClock, Snapshot
from zofftk.layout import Piece
from zofftk.trace import Trace

StreamName = Literal["compute", "down", "up", "host", "comm"]
Place = Literal["device", "host"]

COMPUTE: StreamName = "compute"  # the model's forward and backward, pack and copy back
DOWN: StreamName = "down"  # copies from the device to the host
UP: StreamName = "up"  # copies from the host to the device
HOST: StreamName = "host"  # norm and update on the CPU
COMM: StreamName = "comm"  # collectives between the devices of several ranks


@dataclass(eq=False)
class Buffer:
    """A named piece of memory: 1-D, of one dtype, on the device or on the host."""

    name: str
    place: Place
    tensor: torch.Tensor
    clock: BufferClock

    def part(self, offset: int, numel: int) -> Buffer:
        """A range of it, with the same race clock."""
        return Buffer(self.name, self.place, self.tensor[offset : offset + numel], self.clock)

    @property
    def itemsize(self) -> int:
        return self.tensor.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.itemsize


@dataclass(eq=False)
class Event:
    """A point in a stream that other streams, or the host, can wait for."""

    stream: StreamName
    snapshot: Snapshot
    handle: Any  # the machine's own event


@dataclass(eq=False)
class Placement:
    """Where ranges of tensors lie in a flat buffer. Made once and used every step, with other tensors each time.

    A range is a `Piece`: elements [start, stop) of a tensor in row-major order, their place, and that of their
    statistics.
    """

    pieces: Sequence[Piece]
    plan: Any = None  # what a machine has worked out for it


@dataclass(frozen=True)
class Run:
    """A contiguous range of a buffer."""

    offset: int
    numel: int


@dataclass(frozen=True)
class Work:
    """How much a host task does, for a machine that only takes its time."""

    updates: int  # elements whose optimizer states it updates ...
    nbytes: int  # ... or else what it reads and writes


class Device(ABC):
    """One machine. `trace` holds what it did; `bytes_down` and `bytes_up` what crossed the link."""

    def __init__(self, *, keep_spans: bool = False) -> None:
        self.clock = RaceClock()
        self.trace = Trace(keep_spans=keep_spans)
        self.bytes_down = 0
        self.bytes_up = 0

    # -- memory ------------------------------------------------------------------------------------------------

    def buffer(
        self, name: str, numel: int, dtype: torch.dtype, place: Place, *, zero: bool = False, on_link: bool = False
    ) -> Buffer:
        """Allocate. `zero` asks for zeros, otherwise the content is undefined; `on_link` says that a host buffer is
        one end of copies, so that it is page-locked where the machine can do it."""
        return Buffer(name, place, self._allocate(numel, dtype, place, zero, on_link), BufferClock(name))

    def slice(self, buffer: Buffer, name: str, offset: int, numel: int) -> Buffer:
        """A part of `buffer` with a race clock of its own; the whole is not to be used beside it."""
        return Buffer(name, buffer.place, buffer.tensor[offset : offset + numel], BufferClock(name))

    # -- order -------------------------------------------------------------------------------------------------

    def record(self, stream: StreamName) -> Event:
        """An event that happens when everything enqueued on `stream` so far is done."""
        return Event(stream, self.clock.record(stream), self._record(stream))

    def wait(self, stream: StreamName, event: Event, why: str) -> None:
        """`stream` goes on only after `event`; `why` says what the wait protects."""
        self.clock.wait(stream, event.snapshot)
        self._wait(stream, event, why)

    def synchronize(self, event: Event, why: str) -> None:
        """The calling thread goes on only after `event`; raises what a stream has raised."""
        self.clock.wait(MAIN, event.snapshot)
        self._synchronize(event, why)

    # -- operations --------------------------------------------------------------------------------------------

    def pack(
        self, label: str, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer, square_sums: Buffer
    ) -> None:
        """On compute: write the range of each tensor into `dst`, with cast, and the square sums of its blocks."""
        self.check_going()
        self.clock.operation(COMPUTE, label, writes=(dst.clock, square_sums.clock))
        self._pack(label, placement, tensors, dst, square_sums)

    def copy_down(self, label: str, dst: Buffer, src: Buffer, runs: Sequence[Run]) -> None:
        """On down: copy `runs` of a device buffer to the same places of a host buffer of the same dtype."""
        self.check_going()
        nbytes = self._check_copy(dst, "host", src, "device", runs)
        self.clock.operation(DOWN, label, reads=(src.clock,), writes=(dst.clock,))
        self.bytes_down += nbytes
        self._copy(DOWN, label, dst, src, runs, nbytes)

    def copy_up(self, label: str, dst: Buffer, src: Buffer, runs: Sequence[Run]) -> None:
        """On up: copy `runs` of a host buffer to the same places of a device buffer of the same dtype."""
        self.check_going()
        nbytes = self._check_copy(dst, "device", src, "host", runs)
        self.clock.operation(UP, label, reads=(src.clock,), writes=(dst.clock,))
        self.bytes_up += nbytes
        self._copy(UP, label, dst, src, runs, nbytes)

    def copy_back(self, label: str, src: Buffer, placement: Placement, tensors: Sequence[torch.Tensor]) -> None:
        """On compute: the inverse of pack; autograd sees that the tensors were written."""
        self.check_going()
        self.clock.operation(COMPUTE, label, reads=(src.clock,))
        self._copy_back(label, src, placement, tensors)

    def host_task(
        self,
        label: str,
        task: Callable[[], None],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        updates: int = 0,
    ) -> None:
        """On host: run `task`, which touches nothing but the buffers named; `updates` elements take their update."""
        self.check_going()
        self.clock.operation(HOST, label, [b.clock for b in reads], [b.clock for b in writes])
        nbytes = sum(buffer.nbytes for buffer in reads) + sum(buffer.nbytes for buffer in writes)
        self._sized_host_task(label, task, Work(updates, nbytes))

    def open_comm(self) -> None:
        """Have the stream of collectives, which a machine of a single rank does without."""
        self._open_comm()

    def zero(self, label: str, dst: Buffer) -> None:
        """On compute: fill a device buffer with zeros."""
        self.check_going()
        self.clock.operation(COMPUTE, label, writes=(dst.clock,))
        self._zero(label, dst)

    def collective(
        self,
        label: str,
        operation: Callable[[torch.Tensor, torch.Tensor], None],
        dst: Buffer,
        src: Buffer,
    ) -> None:
        """On comm: `operation(dst, src)` of torch.distributed on device buffers; either may be a part of the other."""
        self.check_going()
        reads = () if dst.clock is src.clock else (src.clock,)
        self.clock.operation(COMM, label, reads=reads, writes=(dst.clock,))
        self._sized_collective(label, lambda: operation(dst.tensor, src.tensor), dst, src)

    # -- what the main thread looks at -------------------------------------------------------------------------

    def value(self, label: str, buffer: Buffer) -> np.ndarray:
        """The content of a small fp64 host buffer; the caller has synchronised with who wrote it."""
        self.clock.operation(MAIN, label, reads=(buffer.clock,))
        return self._value(buffer)

    def load(self, label: str, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer) -> None:
        """Copy tensors into a host buffer, widening to its dtype; blocks, and is for use outside of a step."""
        self.clock.operation(MAIN, label, writes=(dst.clock,))
        self._load(placement, tensors, dst)

    def touch(self, label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        """The main thread reads or writes host buffers through tensors it holds."""
        self.clock.operation(MAIN, label, [b.clock for b in reads], [b.clock for b in writes])

    def collect_spans(self) -> None:  # noqa: B027  (most machines write their spans at once)
        """Put spans that are not in `trace` yet there; the streams may go on."""

    def runs_here(self) -> bool:
        """The calling thread is one of the machine's own."""
        return False

    def check_going(self) -> None:  # noqa: B027  (a machine without threads raises at once)
        """Raise what a stream has raised: after it, the clock knows of operations that never were."""

    def unseen(self, error: Exception) -> None:  # noqa: B027  (of use only where a fault is raised once)
        """A stream's fault was raised where nobody could see it: raise it again for the next who waits."""

    @abstractmethod
    def close(self) -> None:
        """End the streams, after what was enqueued on them; idempotent."""

    # -- what a machine that has no data looks at as well -------------------------------------------------------

    def _sized_host_task(self, label: str, task: Callable[[], None], work: Work) -> None:
        """How long it takes, most machines learn by running it."""
        self._host_task(label, task)

    def _sized_collective(self, label: str, operation: Callable[[], None], dst: Buffer, src: Buffer) -> None:
        self._collective(label, operation)

    # -- what a machine implements -----------------------------------------------------------------------------

    @abstractmethod
    def _allocate(self, numel: int, dtype: torch.dtype, place: Place, zero: bool, on_link: bool) -> torch.Tensor: ...

    @abstractmethod
    def _record(self, stream: StreamName) -> Any: ...

    @abstractmethod
    def _wait(self, stream: StreamName, event: Event, why: str) -> None: ...

    @abstractmethod
    def _synchronize(self, event: Event, why: str) -> None: ...

    @abstractmethod
    def _pack(
        self, label: str, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer, square_sums: Buffer
    ) -> None: ...

    @abstractmethod
    def _copy(
        self, stream: StreamName, label: str, dst: Buffer, src: Buffer, runs: Sequence[Run], nbytes: int
    ) -> None: ...

    @abstractmethod
    def _copy_back(self, label: str, src: Buffer, placement: Placement, tensors: Sequence[torch.Tensor]) -> None: ...

    @abstractmethod
    def _zero(self, label: str, dst: Buffer) -> None: ...

    @abstractmethod
    def _open_comm(self) -> None: ...

    @abstractmethod
    def _collective(self, label: str, operation: Callable[[], None]) -> None: ...

    @abstractmethod
    def _host_task(self, label: str, task: Callable[[], None]) -> None: ...

    @abstractmethod
    def _value(self, buffer: Buffer) -> np.ndarray: ...

    @abstractmethod
    def _load(self, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer) -> None: ...

    def _check_copy(self, dst: Buffer, dst_place: Place, src: Buffer, src_place: Place, runs: Sequence[Run]) -> int:
        assert (dst.place, src.place) == (dst_place, src_place), (dst.name, src.name)
        assert dst.tensor.dtype == src.tensor.dtype, (dst.name, src.name)  # a cast would go through pageable memory
        return sum(run.numel for run in runs) * src.itemsize
