"""Pack and copy back on CPU memory: compiled kernels on a table of ranges, eager torch for what they do not know.

They run on the calling thread alone: torch's own threads spin for milliseconds after each of its operations, and
sharing the cores with them costs more than a second thread would bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zofftk import cpu_kernels
from zofftk.device.base import Placement
from zofftk.layout import Piece
from zofftk.triton_kernels import Range, reference  # pyright: ignore[reportMissingImports]  (mapped when installed)


def pack(placement: Placement, tensors: Sequence[torch.Tensor], flat: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the range of each tensor into `flat`, with cast, and the fp64 square sums of its blocks into `sums`."""
    for dtype, rows in _by_dtype(tensors, flat.dtype).items():
        if dtype is None:
            _pack_strided(placement, rows, tensors, flat, sums)
            continue
        table = _table(placement, rows, tensors, flat)
        table[:, 3] *= sums.dtype.itemsize
        table[:, 3] += sums.data_ptr()
        cpu_kernels.pack_ranges(table, dtype, flat.dtype)


def copy_back(flat: torch.Tensor, placement: Placement, tensors: Sequence[torch.Tensor]) -> None:
    """The inverse of pack; moves the version counters of the tensors."""
    for dtype, rows in _by_dtype(tensors, flat.dtype).items():
        if dtype is None:
            reference.copy_back(flat, [_range(placement.pieces[row], tensors[row]) for row in rows])
            continue
        table = _table(placement, rows, tensors, flat)
        cpu_kernels.convert_ranges(table[:, [1, 0, 2, 3]].copy(), flat.dtype, dtype)
        torch.autograd.graph.increment_version([tensors[row] for row in rows])


def load(placement: Placement, tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """pack without statistics, for tensors of any dtype."""
    ranges = [_range(piece, tensor) for piece, tensor in zip(placement.pieces, tensors, strict=True)]
    reference.pack(ranges, flat)


def _by_dtype(tensors: Sequence[torch.Tensor], flat: torch.dtype) -> dict[torch.dtype | None, list[int]]:
    """Positions of the tensors of each dtype that the compiled kernels can move; under None those that they cannot."""
    first = tensors[0].dtype
    if cpu_kernels.converts(first, flat) and all(t.dtype is first and t.is_contiguous() for t in tensors):
        return {first: list(range(len(tensors)))}
    groups: dict[torch.dtype | None, list[int]] = {}
    for row, tensor in enumerate(tensors):
        plain = tensor.is_contiguous() and cpu_kernels.converts(tensor.dtype, flat)
        groups.setdefault(tensor.dtype if plain else None, []).append(row)
    return groups


def _columns(placement: Placement) -> np.ndarray:
    """start, offset, numel and block of every piece; worked out once."""
    if placement.plan is None:
        rows = [(piece.start, piece.offset, piece.numel, piece.block) for piece in placement.pieces]
        placement.plan = np.array(rows, np.int64).reshape(-1, 4)
    return placement.plan


def _table(placement: Placement, rows: list[int], tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> np.ndarray:
    """Addresses in the tensors, addresses in `flat`, numbers of elements, and the blocks of the pieces."""
    table = _columns(placement)[rows]
    table[:, 0] *= tensors[rows[0]].dtype.itemsize
    table[:, 0] += np.fromiter((tensors[row].data_ptr() for row in rows), np.int64, len(rows))
    table[:, 1] *= flat.dtype.itemsize
    table[:, 1] += flat.data_ptr()
    return table


def _pack_strided(
    placement: Placement, rows: list[int], tensors: Sequence[torch.Tensor], flat: torch.Tensor, sums: torch.Tensor
) -> None:
    for row in rows:
        piece = placement.pieces[row]
        reference.pack([_range(piece, tensors[row])], flat)
        cpu_kernels.block_square_sums(flat[piece.offset : piece.offset + piece.numel], sums[piece.block :], 1)


def _range(piece: Piece, tensor: torch.Tensor) -> Any:
    return Range(tensor, piece.start, piece.stop, piece.offset)
