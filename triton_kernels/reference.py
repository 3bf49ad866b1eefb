"""The kernels in eager torch: the oracle of every fast path, and the path itself on CPU tensors.

Names, arguments and errors are those of the kernels; any floating dtype is taken. Elements are counted in row-major
order of the tensor's shape, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .ranges import BLOCK_NUMEL, Range, as_ranges, check_dtype, check_flat, check_sums, check_tensor, count_blocks


def pack(
    ranges: Sequence[Range],
    flat: torch.Tensor,
    square_sums: torch.Tensor | None = None,
    flag: torch.Tensor | None = None,
) -> None:
    """The twin of :func:`zofftk.triton_kernels.pack`."""
    ranges = _check(ranges, flat)
    check_sums(square_sums, flag, max((r.block + r.span.num_blocks for r in ranges), default=0), flat.device)
    with torch.no_grad():
        targets = [flat[r.offset : r.offset + r.span.numel] for r in ranges]
        sources = [_elements(r.tensor.detach(), r.start, r.stop) for r in ranges]
        if targets:
            torch.ops.aten._foreach_copy_(targets, sources)
        if square_sums is not None:
            for r, target in zip(ranges, targets, strict=True):
                _write_stats(target, square_sums[r.block :], flag)


def copy_back(flat: torch.Tensor, ranges: Sequence[Range]) -> None:
    """The twin of :func:`zofftk.triton_kernels.copy_back`."""
    ranges = _check(ranges, flat)
    with torch.no_grad():
        targets, sources = [], []
        for tensor, start, stop, offset, _ in ranges:
            source = flat[offset : offset + stop - start]
            if start == 0 and stop == tensor.numel():
                targets.append(tensor)
                sources.append(source.view(tensor.shape))
            elif tensor.is_contiguous():
                targets.append(tensor.view(-1)[start:stop])
                sources.append(source)
            else:
                _write_strided_(tensor, start, source)
        if targets:
            torch.ops.aten._foreach_copy_(targets, sources)


def grad_stats(flat: torch.Tensor, square_sums: torch.Tensor, flag: torch.Tensor | None = None) -> None:
    """The twin of :func:`zofftk.triton_kernels.grad_stats`."""
    check_flat(flat, 0)
    check_sums(square_sums, flag, count_blocks(flat.numel()), flat.device)
    with torch.no_grad():
        _write_stats(flat, square_sums, flag)


def _check(ranges: Sequence[Range], flat: torch.Tensor) -> list[Range]:
    ranges = as_ranges(ranges)
    check_flat(flat, max((r.offset + r.span.numel for r in ranges), default=0))
    for index, r in enumerate(ranges):
        check_tensor(index, r.tensor, r.stop, flat.device)
        check_dtype(f"range {index}", r.tensor.dtype, None)
    return ranges


def _elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor.reshape(-1)[start:stop]


def _write_strided_(tensor: torch.Tensor, start: int, source: torch.Tensor) -> None:
    """Through a row-major copy: the elements of a range have no common stride."""
    rows = tensor.detach().contiguous()
    rows.view(-1)[start : start + source.numel()].copy_(source)
    tensor.copy_(rows)


def _write_stats(flat: torch.Tensor, square_sums: torch.Tensor, flag: torch.Tensor | None) -> None:
    squares = torch.nn.functional.pad(flat.double().square(), (0, -flat.numel() % BLOCK_NUMEL))
    sums = squares.view(-1, BLOCK_NUMEL).sum(1)
    square_sums[: sums.numel()].copy_(sums)
    if flag is not None:
        flag[0].logical_or_(~sums.isfinite().all())
