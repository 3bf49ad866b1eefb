"""Between states that are spread over ranks and whole ones: for one file that any number of ranks can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zofftk.errors import InputError
from zofftk.mapped import FileMappings
from zofftk.sharding.joint_work import JointWork, talking
from zofftk.sharding.state import ShardedState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHUNK_BYTES = 64 << 20  # what one message carries
PURPOSE = "zofftk's whole states"


@dataclass(frozen=True)
class _Held:
    """One rank's word on one state."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[tuple[int, int], ...]


def gather_full(state: Any, group: ProcessGroup | None = None, *, dst: int | None = 0) -> Any:
    """The dicts and lists of `state` with whole tensors in place of each `ShardedState`; other values as they are.

    A collective: every rank of `group` calls it, with the same keys. So `zofftk.save(path, gather_full(...))` on rank
    0 writes one file in `torch.optim`'s format. A receiving rank allocates the whole tensors and nothing beside them;
    the others allocate nothing.

    Args:
        state: e.g. `opt.state_dict()`.
        group: the ranks that hold the states; None means all, or this process where torch.distributed is not in use.
        dst: the rank in the group that gets them; None means all.

    Returns:
        The whole state, on the CPU; None on a rank that gets nothing.

    Raises:
        InputError: the ranks do not hold each element once, or not the same states; names one. A ValueError. Raised
            on all ranks, before anything is sent.
        RuntimeError: another rank has ended.
    """
    ranks = JointWork.of(group, PURPOSE)
    leaves = dict(_leaves(state, "state"))
    held = [
        _Held(name, tuple(leaf.shape), leaf.dtype, tuple((part.start, part.stop) for part in leaf.parts))
        for name, leaf in leaves.items()
    ]
    by_rank = ranks.each(lambda: held)
    owners = _owners(by_rank)  # raises the same on all ranks: all have the same words
    receives = dst is None or dst == ranks.rank
    whole: dict[str, torch.Tensor] = {}
    for number, (name, leaf) in enumerate(leaves.items()):
        full = torch.empty(leaf.shape, dtype=leaf.dtype) if receives else None
        for start, stop, owner in owners[number]:
            _move(leaf, None if full is None else full.view(-1), start, stop, owner, ranks, dst)
        if full is not None:
            whole[name] = full
    return _replaced(state, "state", whole) if receives else None


def take_full(state: Any, full: Any) -> None:
    """Write what is in whole tensors into the `ShardedState`s of `state`, each rank its own parts.

    No collective. Of mapped tensors (`zofftk.load`), a rank reads its own ranges alone.

    Args:
        state: dicts and lists, e.g. `opt.state_dict()`; what is not a `ShardedState` in it is left alone.
        full: the same dicts and lists with whole tensors, e.g. `zofftk.load(path)["optimizer"]`.

    Raises InputError, before anything is written, where a tensor is missing or has another shape; names it.
    """
    pairs: list[tuple[ShardedState, torch.Tensor]] = []
    for name, leaf, value in _pairs(state, full, "state"):
        if not isinstance(value, torch.Tensor) or isinstance(value, ShardedState) or value.shape != leaf.shape:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise InputError(f"{name}: expected a whole tensor of shape {tuple(leaf.shape)}, got {got}")
        pairs.append((leaf, value))
    files = FileMappings()
    for leaf, value in pairs:
        leaf.read_from(value, files)
    files.release()


def _move(
    leaf: ShardedState,
    flat: torch.Tensor | None,
    start: int,
    stop: int,
    owner: int,
    ranks: JointWork,
    dst: int | None,
) -> None:
    """Elements [start, stop) from their owner into `flat`, which ranks that get them have."""
    mine = None
    if owner == ranks.rank:
        part = next(part for part in leaf.parts if part.start == start)
        mine = part.values
        if flat is not None:
            flat[start:stop].copy_(mine)
    if ranks.group is None or owner == dst:
        return
    # The receiver's memory is the message's: nothing is copied on the way.
    source = mine if flat is None else flat[start:stop]
    if source is None:
        return
    step = max(1, CHUNK_BYTES // leaf.dtype.itemsize)
    for chunk in source.detach().split(step):
        with talking():
            if dst is None:
                dist.broadcast(chunk.view(torch.uint8), group=ranks.group, group_src=owner)
            elif ranks.rank == dst:
                dist.recv(chunk.view(torch.uint8), group=ranks.group, group_src=owner)
            else:
                dist.send(chunk.view(torch.uint8), group=ranks.group, group_dst=dst)


def _owners(by_rank: list[list[_Held]]) -> list[list[tuple[int, int, int]]]:
    """Of each state, its ranges in order with the rank that holds each."""
    first = [(held.name, held.shape, held.dtype) for held in by_rank[0]]
    for rank, states in enumerate(by_rank):
        others = [(held.name, held.shape, held.dtype) for held in states]
        if others != first:
            mine, theirs = next(pair for pair in zip_longest(first, others) if pair[0] != pair[1])
            raise InputError(f"rank 0 and rank {rank} hold different states: {mine} and {theirs}")
    owners = []
    for number, (name, shape, _) in enumerate(first):
        ranges = sorted((*ends, rank) for rank, states in enumerate(by_rank) for ends in states[number].ranges)
        at = 0
        for start, stop, _ in [*ranges, (torch.Size(shape).numel(),) * 2 + (0,)]:
            if start != at:
                fault = "no rank holds" if start > at else "two ranks hold"
                raise InputError(f"{fault} elements [{min(start, at)}, {max(start, at)}) of {name}")
            at = stop
        owners.append(ranges)
    return owners


def _leaves(value: Any, where: str) -> Iterator[tuple[str, ShardedState]]:
    if isinstance(value, ShardedState):
        yield where, value
    for key, item in _items(value):
        yield from _leaves(item, f"{where}[{key!r}]")


def _pairs(value: Any, full: Any, where: str) -> Iterator[tuple[str, ShardedState, Any]]:
    if isinstance(value, ShardedState):
        yield where, value, full
    for key, item in _items(value):
        name = f"{where}[{key!r}]"
        if any(True for _ in _leaves(item, name)):
            try:
                other = full[key]
            except (KeyError, IndexError, TypeError):
                raise InputError(f"{name}: expected an entry for it, there is none") from None
            yield from _pairs(item, other, name)


def _replaced(value: Any, where: str, whole: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, ShardedState):
        return whole[where]
    if isinstance(value, Mapping):
        return {key: _replaced(item, f"{where}[{key!r}]", whole) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, f"{where}[{number}]", whole) for number, item in enumerate(value)]
    return value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)
