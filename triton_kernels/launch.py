"""What the launchers share: the way to Triton, the tables of ranges and the tables of addresses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from .ranges import DTYPES, Span, as_spans, check_dtype, check_tensor

_NUM_SLOTS = 2  # page-locked address tables, so that filling one need not wait for the copy of the one before


def runs_eagerly(device: torch.device) -> bool:
    """CPU tensors go through eager torch, unless Triton's interpreter has been asked for.

    Raises:
        ValueError: a device that is neither cpu nor cuda, or the interpreter with tensors that are not on the CPU.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected tensors on cpu or cuda, got {device}")
    if interpreted and device.type != "cpu":
        raise ValueError(f"expected tensors on cpu, since TRITON_INTERPRET=1, got {device}")
    return device.type == "cpu" and not interpreted


def load_kernels() -> Any:
    """The module of device code; imports Triton."""
    try:
        from . import kernels
    except ImportError as error:
        raise ImportError(
            "the kernels for GPU tensors need Triton, which cannot be imported here: pip install triton "
            "(CUDA builds of torch bring it; CPU tensors do without it)"
        ) from error
    return kernels


def enqueue(kernel: Any, num_programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
    """Enqueue on torch's current stream. Multiply and add may fuse: squares of fp32 values are exact in fp64."""
    kernels = load_kernels()
    with _current(device):
        kernel[(num_programs,)](*args, **constants, num_warps=kernels.NUM_WARPS, enable_fp_fusion=True)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its memory holds its elements in row-major order, otherwise a copy where it does."""
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_neg().contiguous()


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def note_writes(tensors: Sequence[torch.Tensor | None]) -> None:
    """Autograd refuses to use what has been written in an older graph."""
    written = [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)


class Group(NamedTuple):
    """The ranges of one dtype: one launch, a program for each block."""

    dtype: torch.dtype
    range_of_program: torch.Tensor  # int32, on the device

    @property
    def num_programs(self) -> int:
        return self.range_of_program.numel()


class Tables:
    """Everything about a list of ranges but the addresses of their tensors; stays on the device.

    `rows` holds start, stop, offset, first program, and first sum less first program of each range, in int64.
    """

    def __init__(self, spans: Sequence[Span], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        rows = [[0] * 5 for _ in spans]
        self.groups: list[Group] = []
        for dtype in DTYPES:
            members = [index for index, span in enumerate(spans) if dtypes[index] == dtype and span.num_blocks > 0]
            num_programs = 0
            for index in members:
                start, stop, offset, block = spans[index]
                rows[index] = [start, stop, offset, num_programs, block - num_programs]
                num_programs += spans[index].num_blocks
            if members:
                counts = torch.tensor([spans[index].num_blocks for index in members])
                self.groups.append(
                    Group(dtype, torch.tensor(members, dtype=torch.int32).repeat_interleave(counts).to(device))
                )
        self.rows = torch.tensor(rows, dtype=torch.int64).to(device)


class AddressTable:
    """Where the tensors of a call lie, on the device.

    Page-locked memory is taken once, here. A call fills a slot and enqueues its copy; it waits only for the copy that
    was enqueued from this slot `_NUM_SLOTS` calls ago. Addresses that are still on the device are not sent again.
    """

    def __init__(self, num: int, device: torch.device) -> None:
        self.on_device = torch.empty(num, dtype=torch.int64, device=device)
        self._is_cuda = device.type == "cuda"
        self._slots = [torch.empty(num, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(_NUM_SLOTS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_SLOTS
        self._turn = 0
        self._held: list[int] = []

    def send(self, addresses: list[int]) -> torch.Tensor:
        if addresses == self._held:
            return self.on_device
        self._turn = (self._turn + 1) % _NUM_SLOTS
        slot, copied = self._slots[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # protects the slot: its last copy may still be on the way
        slot.numpy()[:] = addresses
        self.on_device.copy_(slot, non_blocking=True)
        if self._is_cuda:
            with _current(self.on_device.device):
                copied = copied or torch.cuda.Event()
                copied.record()
            self._copied[self._turn] = copied
        self._held = addresses
        return self.on_device


class Plan:
    """What pack and copy back prepare once for a list of ranges."""

    def __init__(self, spans: Sequence[Span], dtypes: Sequence[torch.dtype], device: torch.device | str | int) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        self.spans = as_spans(spans)
        self.dtypes = list(dtypes)
        if len(self.spans) != len(self.dtypes):
            raise ValueError(f"expected a dtype for each of {len(self.spans)} spans, got {len(self.dtypes)}")
        self.flat_numel = max((span.offset + span.numel for span in self.spans), default=0)
        self.num_blocks = max((span.block + span.num_blocks for span in self.spans), default=0)
        self.runs_eagerly = runs_eagerly(self.device)
        for index, dtype in enumerate(self.dtypes):
            check_dtype(f"range {index}", dtype, None if self.runs_eagerly else DTYPES)
        if not self.runs_eagerly:
            self.tables = Tables(self.spans, self.dtypes, self.device)
            self._addresses = AddressTable(len(self.spans), self.device)

    def send_addresses(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._addresses.send([tensor.data_ptr() for tensor in tensors])

    def check_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != len(self.spans):
            raise ValueError(f"expected {len(self.spans)} tensors, one for each span, got {len(tensors)}")
        for index, tensor in enumerate(tensors):
            check_tensor(index, tensor, self.spans[index].stop, self.device)
            if tensor.dtype != self.dtypes[index]:
                raise TypeError(f"range {index}: expected dtype {self.dtypes[index]}, got {tensor.dtype}")

    def check_device(self, flat: torch.Tensor) -> None:
        if flat.device != self.device:
            raise ValueError(f"flat: expected a tensor on {self.device}, got one on {flat.device}")


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
