"""Many tensors into one flat buffer, with cast, sums of squares and a non-finite flag, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import launch, reference
from .ranges import DTYPES, Range, Span, as_ranges, check_disjoint, check_flat, check_sums


def pack(
    ranges: Sequence[Range],
    flat: torch.Tensor,
    square_sums: torch.Tensor | None = None,
    flag: torch.Tensor | None = None,
) -> None:
    """Write elements [start, stop) of each tensor to `flat[offset:]`, cast to its dtype (nearest, ties to even).

    On CUDA this enqueues one kernel for each dtype among the tensors, on torch's current stream, and waits for
    nothing. On the CPU it is :func:`zofftk.triton_kernels.reference.pack`. Prepares tables at each call; a loop that
    packs the same ranges again and again keeps a :class:`PackPlan`.

    Args:
        ranges: `Range(tensor, start, stop, offset, block)` each, sharing no element of `flat`. Tensors are float32,
            bfloat16 or float16, of any shape and strides; their elements count in row-major order. One that is not
            contiguous is copied first. Empty ranges are fine.
        flat: 1-D and contiguous, float32, bfloat16 or float16.
        square_sums: 1-D, contiguous, float64. `square_sums[block + i]` becomes the sum of squares of the range's
            elements [4096 i, 4096 (i + 1)) as they are in `flat`. None: not computed.
        flag: int32, 1-D, one element: becomes 1 if any of those sums is not finite, which is if any element is not
            finite; otherwise it stays as it is. Zero it before the first of the calls that share it.

    Where tensor and flat both lie on 16 bytes, and for all but the last few elements of a range, memory moves in
    accesses of 16 bytes; any other alignment works and is slower. Addresses are 64-bit.

    Raises:
        TypeError: not a tensor, not an integer, or another dtype than listed.
        ValueError: shape, layout, device or a number is not as listed. Nothing has been written then.
        ImportError: CUDA tensors, and Triton is not installed.

    Source: the gradients' way to the CPU in ZeRO-Offload (arXiv:2101.06840), section 4.1.
    """
    ranges = as_ranges(ranges)
    check_flat(flat, 0)
    plan = PackPlan([r.span for r in ranges], [r.tensor.dtype for r in ranges], flat.device)
    plan([r.tensor for r in ranges], flat, square_sums, flag)


class PackPlan(launch.Plan):
    """Pack the same ranges of ever new tensors: tables are made once, a call sends addresses only.

    Args:
        spans: the range of each tensor.
        dtypes: the dtype of each tensor.
        device: of the tensors.

    The plan takes page-locked memory for 16 bytes a range when it is made. It belongs to one stream at a time: the
    addresses of the next call overwrite those of this one in stream order.
    """

    def __init__(self, spans: Sequence[Span], dtypes: Sequence[torch.dtype], device: torch.device | str | int) -> None:
        super().__init__(spans, dtypes, device)
        check_disjoint("element of flat", ((span.offset, span.offset + span.numel) for span in self.spans))
        self._sums_checked = False

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        flat: torch.Tensor,
        square_sums: torch.Tensor | None = None,
        flag: torch.Tensor | None = None,
    ) -> None:
        """:func:`pack` of `tensors`, in the order of the plan's spans."""
        check_flat(flat, self.flat_numel, None if self.runs_eagerly else DTYPES)
        self.check_device(flat)
        self.check_tensors(tensors)
        check_sums(square_sums, flag, self.num_blocks, self.device)
        if square_sums is not None and not self._sums_checked:
            check_disjoint("sum", ((span.block, span.block + span.num_blocks) for span in self.spans))
            self._sums_checked = True
        if self.runs_eagerly:
            ranges = [Range(tensor, *span) for tensor, span in zip(tensors, self.spans, strict=True)]
            reference.pack(ranges, flat, square_sums, flag)
        else:
            self._launch(tensors, flat, square_sums, flag)

    def _launch(
        self,
        tensors: Sequence[torch.Tensor],
        flat: torch.Tensor,
        square_sums: torch.Tensor | None,
        flag: torch.Tensor | None,
    ) -> None:
        sources = [launch.as_rows(tensor) for tensor in tensors]
        addresses = self.send_addresses(sources)
        for group in self.tables.groups:
            launch.enqueue(
                launch.load_kernels().pack_kernel,
                group.num_programs,
                self.device,
                addresses,
                group.range_of_program,
                self.tables.rows,
                flat.data_ptr(),
                square_sums,
                flag,
                SOURCE=launch.name(group.dtype),
                TARGET=launch.name(flat.dtype),
                SUMS=square_sums is not None,
                FLAG=flag is not None,
            )
        launch.note_writes([flat, square_sums, flag])
