"""Sums of squares and a non-finite flag of a flat buffer, for gradients that are flat already (a reduce-scatter)."""

from __future__ import annotations

import torch

from . import launch, reference
from .ranges import DTYPES, check_dtype, check_flat, check_sums, count_blocks


def grad_stats(flat: torch.Tensor, square_sums: torch.Tensor, flag: torch.Tensor | None = None) -> None:
    """`square_sums[i]` becomes the sum of squares of elements [4096 i, 4096 (i + 1)) of `flat`, in float64.

    On CUDA this enqueues one kernel on torch's current stream and waits for nothing. On the CPU it is
    :func:`zofftk.triton_kernels.reference.grad_stats`.

    Args:
        flat: 1-D and contiguous, float32, bfloat16 or float16; on 16 bytes it is read 16 bytes at a time.
        square_sums: 1-D, contiguous, float64, one element for each started block of 4096.
        flag: int32, 1-D, one element: becomes 1 if any sum is not finite, otherwise it stays as it is.

    Raises:
        TypeError: not a tensor, or another dtype than listed.
        ValueError: shape, layout or device is not as listed.
        ImportError: CUDA tensors, and Triton is not installed.

    Source: the gradient norm of ZeRO-Offload's clipping (arXiv:2101.06840), taken block by block.
    """
    check_flat(flat, 0)
    eager = launch.runs_eagerly(flat.device)
    check_dtype("flat", flat.dtype, None if eager else DTYPES)
    num_blocks = count_blocks(flat.numel())
    check_sums(square_sums, flag, num_blocks, flat.device)
    if eager:
        reference.grad_stats(flat, square_sums, flag)
    elif num_blocks > 0:
        launch.enqueue(
            launch.load_kernels().grad_stats_kernel,
            num_blocks,
            flat.device,
            flat.data_ptr(),
            flat.numel(),
            square_sums,
            flag,
            DTYPE=launch.name(flat.dtype),
            FLAG=flag is not None,
        )
        launch.note_writes([square_sums, flag])
