"""A CUDA device: copies on CuPy's streams beside torch's, page-locked host memory, Triton kernels on torch's stream.

Compute is the stream torch works on. The lanes of down and up issue copies to CUDA streams of their own; the lane of
host runs the update and waits, on the CPU, for what has come down. So Python's main thread blocks only where the
engine asks for a value, or where compute is to go on with parameters whose update has not been issued yet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from zofftk.device.base import COMM, COMPUTE, DOWN, HOST, UP, Buffer, Event, Place, Placement, Run, StreamName
from zofftk.device.device_spans import DeviceSpans
from zofftk.device.laned import LanedDevice, Operation
from zofftk.device.pinned import PinnedMemory

logger = logging.getLogger("zofftk")

NON_BLOCKING = 1  # cudaStreamNonBlocking: no implicit order with the default stream
HIGH_PRIORITY = -1  # a copy that is ready does not wait behind compute
DISABLE_TIMING = 2  # cudaEventDisableTiming
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind


class Kernels(Protocol):
    """What `zofftk.triton_kernels` offers on device tensors."""

    def pack(
        self, placement: Placement, tensors: Sequence[torch.Tensor], flat: torch.Tensor, sums: torch.Tensor
    ) -> None: ...
    def copy_back(self, flat: torch.Tensor, placement: Placement, tensors: Sequence[torch.Tensor]) -> None: ...


class Mark:
    """An event's handle: `issued` once the lane has come to it, and the CUDA event that was recorded then, if any."""

    def __init__(self) -> None:
        self.issued = threading.Event()
        self.event: int | None = None
        self.destroy: Callable[[int], Any] | None = None

    def __del__(self) -> None:
        if self.event is not None and self.destroy is not None:
            try:
                self.destroy(self.event)
            except Exception as error:
                # At exit, or after a fault, the driver has let go of all events itself. Nobody could catch this here:
                # Python would print it as an error that it ignores.
                logger.debug("an event was not destroyed: %s", error)


class CudaDevice(LanedDevice):
    """See the module.

    Args:
        device: the CUDA device of the parameters.
        keep_spans: keep a span of every operation, measured by CUDA events, for `trace.write`.
        pinned_bytes: the most page-locked memory to take; None: as much as the buffers need.
        runtime: `cupy.cuda.runtime`, or what behaves like it.
        compute_stream: gives the address of torch's current stream on `device`.
        kernels: pack and copy back on device tensors.
        on_stream: calls an operation of torch so that it works on the stream at an address.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        keep_spans: bool = False,
        pinned_bytes: int | None = None,
        runtime: Any,
        compute_stream: Callable[[], int],
        kernels: Kernels,
        on_stream: Callable[[int, Operation], None],
    ) -> None:
        super().__init__(keep_spans=keep_spans)
        self._device = device
        self._on_stream = on_stream
        self._runtime = runtime
        self._compute_stream = compute_stream
        self._kernels = kernels
        self.pinned = PinnedMemory(runtime, pinned_bytes)
        runtime.setDevice(device.index)
        self._streams: dict[StreamName, int] = {}
        for name in (DOWN, UP):
            self._create_stream(name)
        self._spans = DeviceSpans(runtime, self.trace) if keep_spans else None
        self._start_lanes(lambda stream: None)
        for stream in (DOWN, UP, HOST):
            self._set_device(stream)

    def _create_stream(self, stream: StreamName) -> None:
        self._streams[stream] = self._runtime.streamCreateWithPriority(NON_BLOCKING, HIGH_PRIORITY)

    def _set_device(self, stream: StreamName) -> None:
        # A thread's current device is its own.
        self._enqueue(stream, lambda: self._runtime.setDevice(self._device.index))

    def _open_comm(self) -> None:
        self._create_stream(COMM)
        super()._open_comm()
        self._set_device(COMM)

    # -- memory ------------------------------------------------------------------------------------------------

    def _allocate(self, numel: int, dtype: torch.dtype, place: Place, zero: bool, on_link: bool) -> torch.Tensor:
        if place == "device":
            make = torch.zeros if zero else torch.empty
            return make(numel, dtype=dtype, device=self._device)
        if on_link:
            return self.pinned.allocate(numel * dtype.itemsize).view(dtype)
        flat = np.zeros(max(1, numel) * dtype.itemsize, np.uint8)
        return torch.from_numpy(flat).view(dtype)[:numel]

    # -- order -------------------------------------------------------------------------------------------------

    def _record(self, stream: StreamName) -> Mark:
        mark = Mark()
        if stream == COMPUTE:
            self._check_usable()
            self._record_event(mark, self._compute_stream())
        elif stream == HOST:
            self._enqueue(HOST, mark.issued.set, always=True)
        else:
            self._enqueue(stream, lambda: self._record_event(mark, self._streams[stream]), always=True)
        return mark

    def _record_event(self, mark: Mark, stream: int) -> None:
        try:
            event = self._runtime.eventCreateWithFlags(DISABLE_TIMING)
            mark.destroy = self._runtime.eventDestroy
            self._runtime.eventRecord(event, stream)
            mark.event = event
        finally:
            mark.issued.set()  # also after a fault, so that nobody waits for ever

    def _wait(self, stream: StreamName, event: Event, why: str) -> None:
        mark: Mark = event.handle
        if stream == COMPUTE:
            # The event cannot be waited for on the device before its lane has recorded it.
            self._block(COMPUTE, mark, why)
            self._stream_wait(self._compute_stream(), mark)
        elif stream == HOST:
            self._enqueue(HOST, lambda: self._host_wait(mark), always=True)
        else:
            self._enqueue(stream, lambda: self._issue_wait(self._streams[stream], mark), always=True)

    def _issue_wait(self, stream: int, mark: Mark) -> None:
        mark.issued.wait()
        self._stream_wait(stream, mark)

    def _stream_wait(self, stream: int, mark: Mark) -> None:
        if mark.event is not None:
            self._runtime.streamWaitEvent(stream, mark.event)

    def _host_wait(self, mark: Mark) -> None:
        mark.issued.wait()
        if mark.event is not None:
            self._runtime.eventSynchronize(mark.event)

    def _synchronize(self, event: Event, why: str) -> None:
        self._check_usable()
        with self.trace.span("main", why):
            self._host_wait(event.handle)
        self._fault.raise_if_set()

    def _block(self, lane: str, mark: Mark, why: str) -> None:
        self._check_usable()
        with self.trace.span(lane, why):
            mark.issued.wait()
        self._fault.raise_if_set()

    # -- operations --------------------------------------------------------------------------------------------

    def _pack(
        self, label: str, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer, square_sums: Buffer
    ) -> None:
        self._check_usable()
        pack = self._kernels.pack
        self._measured(
            COMPUTE, label, self._compute_stream(), 0, lambda: pack(placement, tensors, dst.tensor, square_sums.tensor)
        )

    def _copy_back(self, label: str, src: Buffer, placement: Placement, tensors: Sequence[torch.Tensor]) -> None:
        self._check_usable()
        copy_back = self._kernels.copy_back
        self._measured(COMPUTE, label, self._compute_stream(), 0, lambda: copy_back(src.tensor, placement, tensors))

    def _copy(self, stream: StreamName, label: str, dst: Buffer, src: Buffer, runs: Sequence[Run], nbytes: int) -> None:
        size, kind = src.itemsize, DEVICE_TO_HOST if stream == DOWN else HOST_TO_DEVICE
        target, source, queue = dst.tensor.data_ptr(), src.tensor.data_ptr(), self._streams[stream]

        def copy() -> None:
            for run in runs:
                at = run.offset * size
                self._runtime.memcpyAsync(target + at, source + at, run.numel * size, kind, queue)

        # dst and src are held until the copy has been issued; their owners keep them until it has ended.
        self._enqueue(stream, lambda: self._measured(stream, label, queue, nbytes, copy))

    def _zero(self, label: str, dst: Buffer) -> None:
        self._check_usable()

        def zero() -> None:
            dst.tensor.zero_()

        self._measured(COMPUTE, label, self._compute_stream(), 0, zero)

    def _collective(self, label: str, operation: Operation) -> None:
        stream = self._streams[COMM]
        issue = self._on_stream
        self._enqueue(COMM, lambda: self._measured(COMM, label, stream, 0, lambda: issue(stream, operation)))

    def _measured(self, lane: str, label: str, stream: int, nbytes: int, operation: Operation) -> None:
        if self._spans is None:
            operation()
        else:
            self._spans.around(lane, label, stream, nbytes, operation)

    def _host_task(self, label: str, task: Callable[[], None]) -> None:
        def run() -> None:
            with self.trace.span(HOST, label):
                task()

        self._enqueue(HOST, run)

    def collect_spans(self) -> None:
        if self._spans is not None:
            self._spans.collect()

    # -- what the main thread looks at -------------------------------------------------------------------------

    def _value(self, buffer: Buffer) -> np.ndarray:
        return buffer.tensor.numpy()

    def _load(self, placement: Placement, tensors: Sequence[torch.Tensor], dst: Buffer) -> None:
        for piece, tensor in zip(placement.pieces, tensors, strict=True):
            # The dtype changes on the host: a copy that also casts goes through pageable memory of torch's own.
            values = tensor.detach().reshape(-1)[piece.start : piece.stop].cpu()
            dst.tensor[piece.offset : piece.offset + piece.numel].copy_(values)

    def close(self) -> None:
        was_open = bool(self._lanes)
        super().close()
        if was_open:
            for stream in self._streams.values():
                self._runtime.streamSynchronize(stream)
                self._runtime.streamDestroy(stream)


def open_cuda_device(device: torch.device, *, keep_spans: bool, pinned_bytes: int | None) -> CudaDevice:
    """The device on CuPy and Triton; ImportError says how to install what is missing."""
    try:
        from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "parameters on CUDA need CuPy: pip install cupy-cuda12x or cupy-cuda13x, as torch.version.cuda says"
        ) from error
    from zofftk.device import device_kernels

    def on_stream(address: int, operation: Operation) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(address, device)):
            operation()

    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    return CudaDevice(
        device,
        keep_spans=keep_spans,
        pinned_bytes=pinned_bytes,
        runtime=runtime,
        compute_stream=lambda: torch.cuda.current_stream(device).cuda_stream,
        kernels=device_kernels,
        on_stream=on_stream,
    )
