"""The kernels in eager torch: the oracle of every fast path, and the path itself on CPU tensors.

Elements are counted in row-major order of the tensor's shape, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Range = tuple[torch.Tensor, int, int, int]  # tensor, start, stop, offset in the flat buffer


def pack_(ranges: Sequence[Range], flat: torch.Tensor) -> None:
    """Write elements [start, stop) of each tensor to `flat[offset:]`, cast to its dtype (nearest, ties to even).

    Args:
        ranges: (tensor, start, stop, offset) each; tensors of any shape, strides and float dtype.
        flat: 1-D and contiguous.
    """
    with torch.no_grad():
        targets = [flat[offset : offset + stop - start] for _, start, stop, offset in ranges]
        sources = [_elements(tensor.detach(), start, stop) for tensor, start, stop, _ in ranges]
        if targets:
            torch.ops.aten._foreach_copy_(targets, sources)


def copy_back_(flat: torch.Tensor, ranges: Sequence[Range]) -> None:
    """The inverse of `pack_`: write `flat[offset:]` to elements [start, stop) of each tensor, with cast.

    The version counter of every tensor written moves, so autograd refuses to use it in an older graph.
    """
    with torch.no_grad():
        targets, sources = [], []
        for tensor, start, stop, offset in ranges:
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


def block_square_sums(flat: torch.Tensor, block_numel: int) -> torch.Tensor:
    """Sums of squares in fp64 over blocks of `block_numel` elements of a 1-D tensor; the last may be short."""
    squares = flat.double().square()
    padded = torch.nn.functional.pad(squares, (0, -squares.numel() % block_numel))
    return padded.view(-1, block_numel).sum(1)


def _elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor.reshape(-1)[start:stop]


def _write_strided_(tensor: torch.Tensor, start: int, source: torch.Tensor) -> None:
    """Through a row-major copy: the elements of a range have no common stride."""
    rows = tensor.detach().contiguous()
    rows.view(-1)[start : start + source.numel()].copy_(source)
    tensor.copy_(rows)
