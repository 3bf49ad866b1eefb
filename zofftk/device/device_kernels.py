"""Pack and copy back on a CUDA device: the Triton kernels, with a plan kept for each placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zofftk.device.base import Placement
from zofftk.triton_kernels import CopyBackPlan, PackPlan, Span  # pyright: ignore[reportMissingImports]


def pack(placement: Placement, tensors: Sequence[torch.Tensor], flat: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the range of each tensor into `flat`, with cast, and the fp64 square sums of its blocks into `sums`."""
    _plan(PackPlan, placement, tensors, flat.device)(tensors, flat, sums)


def copy_back(flat: torch.Tensor, placement: Placement, tensors: Sequence[torch.Tensor]) -> None:
    """The inverse of pack; moves the version counters of the tensors."""
    _plan(CopyBackPlan, placement, tensors, flat.device)(flat, tensors)


def _plan(kind: Callable[..., Any], placement: Placement, tensors: Sequence[torch.Tensor], device: torch.device) -> Any:
    """The placement's plan of this kind for tensors of these dtypes, made when it is first asked for."""
    key = (kind, tuple(tensor.dtype for tensor in tensors))
    plans = placement.plan = {} if placement.plan is None else placement.plan
    if key not in plans:
        spans = [Span(piece.start, piece.stop, piece.offset, piece.block) for piece in placement.pieces]
        plans[key] = kind(spans, key[1], device)
    return plans[key]
