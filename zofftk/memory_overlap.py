"""Which tensors share memory, among themselves or with each other, to the element."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """A tensor and what errors call it; one that is only read may share its memory with others only read."""

    name: str
    tensor: torch.Tensor
    written: bool


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a strided tensor are at one address."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size == 1:
            continue
        if stride <= reach:
            # Not nested dimension by dimension: each element has to be looked at.
            return _elements(tensor).unique().numel() < tensor.numel()
        reach += stride * (size - 1)
    return False


def overlapping(places: Sequence[Place]) -> tuple[Place, Place] | None:
    """The first two that share an element and of which one is written."""
    for cluster in _clusters(places):
        for number, second in enumerate(cluster):
            for first in cluster[:number]:
                if (first.written or second.written) and _share(first.tensor, second.tensor):
                    return first, second
    return None


def _clusters(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Groups whose address ranges touch one another."""
    ranges = [(*_range(place.tensor), number) for number, place in enumerate(places) if place.tensor.numel() > 0]
    cluster: list[Place] = []
    reach = 0
    for begin, end, number in sorted(ranges):
        if begin >= reach:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(places[number])
        reach = max(reach, end)
    if len(cluster) > 1:
        yield cluster


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    (begin, end), (other_begin, other_end) = _range(first), _range(second)
    if begin >= other_end or other_begin >= end:
        return False
    size = first.element_size()
    dense = all(t.numel() * t.element_size() == stop - start for t, (start, stop) in
                ((first, (begin, end)), (second, (other_begin, other_end))))  # fmt: skip
    if dense or size != second.element_size() or (begin - other_begin) % size:
        return True
    shift = (other_begin - begin) // size
    return bool(torch.isin(_elements(first), _elements(second) + shift).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The place of every element, counted in elements from the first."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return torch.arange(last + 1).as_strided(tensor.shape, tensor.stride()).flatten()
