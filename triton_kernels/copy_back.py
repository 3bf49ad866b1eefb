"""One flat buffer into many tensors, with cast: the inverse of pack."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import launch, reference
from .ranges import DTYPES, Range, as_ranges, check_flat


def copy_back(flat: torch.Tensor, ranges: Sequence[Range]) -> None:
    """Write `flat[offset:]` to elements [start, stop) of each tensor, cast to its dtype (nearest, ties to even).

    On CUDA this enqueues one kernel for each dtype among the tensors, on torch's current stream, and waits for
    nothing. On the CPU it is :func:`zofftk.triton_kernels.reference.copy_back`. Prepares tables at each call; a loop
    that writes the same ranges again and again keeps a :class:`CopyBackPlan`.

    Args:
        flat: 1-D and contiguous, float32, bfloat16 or float16.
        ranges: `Range(tensor, start, stop, offset)` each, sharing no memory. Tensors are float32, bfloat16 or float16,
            of any shape and strides; their elements count in row-major order. One that is not contiguous is written
            through a contiguous copy. Empty ranges are fine.

    The version counter of every tensor moves, so autograd refuses to use it in a graph that is older. Alignment and
    errors are those of :func:`zofftk.triton_kernels.pack`.

    Source: the parameters' way back in ZeRO-Offload (arXiv:2101.06840), section 4.1.
    """
    ranges = as_ranges(ranges)
    check_flat(flat, 0)
    plan = CopyBackPlan([r.span for r in ranges], [r.tensor.dtype for r in ranges], flat.device)
    plan(flat, [r.tensor for r in ranges])


class CopyBackPlan(launch.Plan):
    """Write the same ranges again and again; arguments and limits are those of :class:`PackPlan`.

    As long as the tensors stay where they are, a call sends nothing but the launch itself.
    """

    def __call__(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """:func:`copy_back` to `tensors`, in the order of the plan's spans."""
        check_flat(flat, self.flat_numel, None if self.runs_eagerly else DTYPES)
        self.check_device(flat)
        self.check_tensors(tensors)
        if self.runs_eagerly:
            reference.copy_back(flat, [Range(tensor, *span) for tensor, span in zip(tensors, self.spans, strict=True)])
        else:
            self._launch(flat, tensors)

    def _launch(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        targets = [launch.as_rows(tensor) for tensor in tensors]
        addresses = self.send_addresses(targets)
        for group in self.tables.groups:
            launch.enqueue(
                launch.load_kernels().copy_back_kernel,
                group.num_programs,
                self.device,
                addresses,
                group.range_of_program,
                self.tables.rows,
                flat.data_ptr(),
                SOURCE=launch.name(flat.dtype),
                TARGET=launch.name(group.dtype),
            )
        launch.note_writes(tensors)
        with torch.no_grad():
            for tensor, target in zip(tensors, targets, strict=True):
                if target is not tensor:
                    tensor.copy_(target)
