"""A range of a tensor's elements, or of those of a slice of it, as the few boxes that tile it: integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from operator import add


@dataclass(frozen=True)
class Slice:
    """A box of a tensor whose elements are numbered by themselves, in row-major order, as they lie in memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def boxes(self, start: int, stop: int) -> list[Box]:
        """The slice's elements [start, stop), as boxes of the tensor; their `start` counts in the slice."""
        return [
            Box(tuple(map(add, self.offsets, box.offsets)), box.sizes, box.start)
            for box in boxes(self.sizes, start, stop)
        ]

    def overlaps(self, other: Slice) -> bool:
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(max(one, two) < min(one + its, two + others) for one, its, two, others in sides)


@dataclass(frozen=True)
class Box:
    """Elements that are a box of the tensor, and lie one after another in row-major order too."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # the first one's number in row-major order

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index the tensor with."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a tensor of `shape`, cut into at most 2 * max(1, len(shape)) - 1 boxes, in order.

    A range of rows is: the end of the first, whole ones, the beginning of the last; both ends are cut in the same way.
    """
    assert 0 <= start <= stop <= prod(shape), (shape, start, stop)
    return list(_cut(shape, start, stop, (), 0)) if start < stop else []


def _cut(shape: tuple[int, ...], start: int, stop: int, above: tuple[int, ...], before: int) -> Iterator[Box]:
    """Boxes of the part at the indices `above` of a larger tensor, which `before` elements come before."""
    if not shape:
        yield Box(above, (1,) * len(above), before)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # inside one row
        yield from _cut_row(shape, start, stop, above, before)
        return
    if start < first * row:
        yield from _cut_row(shape, start, first * row, above, before)
    if first < last:
        offsets, sizes = (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
        yield Box((*above, *offsets), (*[1] * len(above), *sizes), before + first * row)
    if last * row < stop:
        yield from _cut_row(shape, last * row, stop, above, before)


def _cut_row(shape: tuple[int, ...], start: int, stop: int, above: tuple[int, ...], before: int) -> Iterator[Box]:
    row = prod(shape[1:])
    index = start // row
    return _cut(shape[1:], start - index * row, stop - index * row, (*above, index), before + index * row)
