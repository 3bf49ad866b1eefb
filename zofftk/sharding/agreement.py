"""Whether what the ranks want to save makes up one checkpoint: the same keys, each element once, and copies alike."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from zofftk.errors import InputError
from zofftk.sharding.state import ShardedState

USE_GROUP = (
    "where process groups have models of their own, pass group=, the process_group of the optimizer, and save each "
    "into a folder of its own"
)
BLOCKS = 256  # of a tensor, that are summed each by itself: what has changed places between them shows


@dataclass(frozen=True)
class Wanted:
    """What one rank wants to save: torch's plan, what each key is, and sums of what another rank may hold too."""

    plan: SavePlan
    kinds: dict[str, str]
    shapes: dict[str, torch.Size]  # of the sharded states, of which it may hold nothing
    sums: dict[Any, int]  # by the index of what is written


def wanted(plan: SavePlan, flat: dict[str, Any], find: Callable[[WriteItem], Any], *, is_first: bool) -> Wanted:
    """`flat`: the values by key; `find`: the tensor of an item. Reads each tensor that is not a `ShardedState` once."""
    shapes = {name: value.shape for name, value in flat.items() if isinstance(value, ShardedState)}
    sums = {
        item.index: content_sum(find(item))
        for item in plan.items
        if item.type != WriteItemType.BYTE_IO and item.index.fqn not in shapes
    }
    # Of values that are not tensors the first rank's count. Torch would save those of the rank with the least to write.
    items = [item for item in plan.items if is_first or item.type != WriteItemType.BYTE_IO]
    return Wanted(dataclasses.replace(plan, items=items), {name: _kind(v) for name, v in flat.items()}, shapes, sums)


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    what = "a state spread over ranks" if isinstance(value, ShardedState) else "a tensor"
    return f"{what} of shape {tuple(value.shape)} and {value.dtype}"


def content_sum(tensor: torch.Tensor) -> int:
    """Equal for equal bits, on whatever device; it takes little more than reading them once, and no copy."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // (8 * BLOCKS) * 8 * BLOCKS
    sums = raw[:whole].view(torch.int64).view(BLOCKS, -1).sum(1).cpu().numpy().tobytes() if whole else b""
    return zlib.crc32(raw[whole:].cpu().numpy().tobytes(), zlib.crc32(sums))


def check_agreement(by_rank: list[Wanted], named: Callable[[int], int]) -> None:
    """Raises InputError where the ranks would save a mixture, or not all.

    Torch takes what several ranks have from any of them. It checks on several ranks that each element is there, and
    not on one, where a load would leave what is missing as it was; and a tensor of which no rank holds anything would
    not be saved.

    Args:
        by_rank: what each rank wants to save.
        named: what the rank with a number is called.
    """
    _check_kinds(by_rank, named)
    _check_held(by_rank, named)
    _check_copies(by_rank, named)


def _check_kinds(by_rank: list[Wanted], named: Callable[[int], int]) -> None:
    first = by_rank[0]
    for rank, wanted in enumerate(by_rank):
        if differing := sorted(first.kinds.keys() ^ wanted.kinds.keys()):
            name = differing[0]
            has, lacks = (0, rank) if name in first.kinds else (rank, 0)
            raise InputError(
                f"rank {named(has)} has {name} to save, and rank {named(lacks)} has not: expected the same keys on all"
            )
        for name, kind in wanted.kinds.items():
            if kind != first.kinds[name]:
                raise InputError(
                    f"{name} is {first.kinds[name]} on rank {named(0)}, {kind} on rank {named(rank)}: expected the same"
                )


def _check_held(by_rank: list[Wanted], named: Callable[[int], int]) -> None:
    shapes = {name: shape for wanted in by_rank for name, shape in wanted.shapes.items()}
    sharded = set(shapes)
    held: dict[str, dict[Any, int]] = {name: {} for name in shapes}  # of each box, the rank that has it
    for rank, wanted in enumerate(by_rank):
        for item in wanted.plan.items:
            if item.type != WriteItemType.SHARD or item.tensor_data is None:
                continue
            name, chunk = item.index.fqn, item.tensor_data.chunk
            shapes.setdefault(name, item.tensor_data.size)
            other = held.setdefault(name, {}).setdefault((chunk.offsets, chunk.sizes), rank)
            if other != rank and name in sharded and prod(chunk.sizes):
                raise InputError(
                    f"ranks {named(other)} and {named(rank)} hold the same elements of {name}, expected each of its "
                    f"{shapes[name].numel()} once: {USE_GROUP}"
                )
    for name, shape in shapes.items():
        number = sum(prod(sizes) for _, sizes in held.get(name, ()))
        if number != shape.numel():
            advice = f": {USE_GROUP}" if number > shape.numel() else ""
            raise InputError(
                f"the ranks hold {number} elements of {name}, expected each of its {shape.numel()} once{advice}"
            )


def _check_copies(by_rank: list[Wanted], named: Callable[[int], int]) -> None:
    seen: dict[Any, tuple[int, int]] = {}
    for rank, wanted in enumerate(by_rank):
        for index, its in wanted.sums.items():
            other, found = seen.setdefault(index, (rank, its))
            if found != its:
                raise InputError(
                    f"{index.fqn} has other values on rank {named(rank)} than on rank {named(other)}, and only one of "
                    "them would be saved: expected a tensor that all ranks have to be the same on all, so broadcast "
                    f"the one to save, such as a model's buffers; or, {USE_GROUP}"
                )
