"""Which elements of which tensor lie where in a flat buffer, and the checks every kernel and its twin make first."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

BLOCK_NUMEL = 4096  # elements over which one sum of squares is taken, counted from the start of each range
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels read and write


class Span(NamedTuple):
    """Elements [start, stop) of a tensor, in row-major order, lie from `offset` on in the flat buffer.

    `block` is the place of their first sum of squares; they have `num_blocks` of them.
    """

    start: int
    stop: int
    offset: int
    block: int = 0

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def num_blocks(self) -> int:
        return count_blocks(self.numel)


class Range(NamedTuple):
    """A tensor and its span."""

    tensor: torch.Tensor
    start: int
    stop: int
    offset: int
    block: int = 0

    @property
    def span(self) -> Span:
        return Span(*self[1:])


def count_blocks(numel: int) -> int:
    """How many sums of squares `numel` elements have."""
    return -(-numel // BLOCK_NUMEL)


def as_spans(spans: Iterable[Span]) -> list[Span]:
    """`spans` in Python's own integers."""
    checked = []
    for index, span in enumerate(spans):
        try:
            start, stop, offset, block = map(operator.index, Span(*span))
        except TypeError:
            raise TypeError(f"range {index}: expected integers, got {span!r}") from None
        if not 0 <= start <= stop:
            raise ValueError(f"range {index}: expected 0 <= start <= stop, got start {start}, stop {stop}")
        if offset < 0 or block < 0:
            raise ValueError(f"range {index}: expected offset and block of 0 or more, got {offset} and {block}")
        checked.append(Span(start, stop, offset, block))
    return checked


def as_ranges(ranges: Iterable[Range]) -> list[Range]:
    """`ranges`, each of a tensor, in Python's own integers."""
    checked = []
    for index, given in enumerate(ranges):
        try:
            checked.append(Range(*given))
        except TypeError:
            raise TypeError(f"range {index}: expected a Range, got {type(given).__name__}") from None
        _check_is_tensor(f"range {index}", checked[-1].tensor)
    return [Range(r.tensor, *span) for r, span in zip(checked, as_spans(r.span for r in checked), strict=True)]


def check_disjoint(what: str, intervals: Iterable[tuple[int, int]]) -> None:
    """Two programs that write one place would race."""
    last_stop = 0
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if start < last_stop:
            raise ValueError(f"expected ranges that share no {what}, got two at {start}")
        last_stop = stop


def check_flat(flat: torch.Tensor, numel: int, dtypes: Sequence[torch.dtype] | None = None) -> None:
    """`flat` is 1-D, contiguous, of one of `dtypes` (None: any floating one) and holds at least `numel` elements."""
    _check_row("flat", flat, numel)
    check_dtype("flat", flat.dtype, dtypes)


def check_dtype(name: str, dtype: torch.dtype, dtypes: Sequence[torch.dtype] | None) -> None:
    if dtypes is not None and dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {dtype}")
    if dtypes is None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{name}: expected a floating dtype, got {dtype}")


def check_sums(
    square_sums: torch.Tensor | None, flag: torch.Tensor | None, num_blocks: int, device: torch.device
) -> None:
    """`square_sums` is fp64, `flag` one int32, both on `device` and contiguous; a flag needs sums."""
    if square_sums is None:
        if flag is not None:
            raise ValueError("flag: expected square_sums beside it, got None")
        return
    rows = [("square_sums", square_sums, torch.float64, num_blocks)]
    if flag is not None:
        rows.append(("flag", flag, torch.int32, 1))
    for name, tensor, dtype, numel in rows:
        _check_row(name, tensor, numel)
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device} as flat, got one on {tensor.device}")


def check_tensor(index: int, tensor: torch.Tensor, stop: int, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):  # spelt out: this runs for each tensor of each step
        _check_is_tensor(f"range {index}", tensor)
    if tensor.device != device:
        raise ValueError(f"range {index}: expected a tensor on {device} as flat, got one on {tensor.device}")
    if tensor.layout != torch.strided:
        raise ValueError(f"range {index}: expected a dense tensor, got layout {tensor.layout}")
    if stop > tensor.numel():
        raise ValueError(f"range {index}: expected at least {stop} elements, got {tensor.numel()}")


def _check_row(name: str, tensor: torch.Tensor, numel: int) -> None:
    _check_is_tensor(name, tensor)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a 1-D contiguous tensor, got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    if tensor.numel() < numel:
        raise ValueError(f"{name}: expected at least {numel} elements, got {tensor.numel()}")


def _check_is_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
