"""Between states that are spread over ranks and whole ones: for one file that any number of ranks can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zofftk.errors import InputError
from zofftk.mapped import FileMappings
from zofftk.sharding.agreement import USE_GROUP
from zofftk.sharding.boxes import Slice
from zofftk.sharding.joint_work import JointWork
from zofftk.sharding.state import ShardedState
from zofftk.sharding.waiting import timeout_for

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
    within: Slice
    ranges: tuple[tuple[int, int], ...]

    @staticmethod
    def of(name: str, leaf: ShardedState) -> _Held:
        ranges = tuple((part.start, part.stop) for part in leaf.parts if not leaf.is_copy)
        return _Held(name, tuple(leaf.shape), leaf.dtype, leaf.within, ranges)


@dataclass(frozen=True)
class _Range:
    """Elements [start, stop) of a slice, which `owner` holds."""

    within: Slice
    start: int
    stop: int
    owner: int


def gather_full(
    state: Any, group: ProcessGroup | None = None, *, dst: int | None = 0, timeout_s: float | None = None
) -> Any:
    """The dicts and lists of `state` with whole tensors in place of each `ShardedState`; other values as they are.

    A collective: every rank of `group` calls it, with the same keys. So `zofftk.save(path, gather_full(...))` on rank
    0 writes one file in `torch.optim`'s format. A receiving rank allocates the whole tensors, and of states cut by
    tensor parallelism one message beside them; the others allocate nothing.

    Args:
        state: e.g. `opt.state_dict()`.
        group: the ranks that hold the states; None means all, or this process where torch.distributed is not in use.
        dst: the rank in the group that gets them; None means all.
        timeout_s: how long to wait for a rank that does not come; None: the `rank_timeout_s` of the optimizer whose
            states they are, else the timeout of `group`.

    Returns:
        The whole state, on the CPU; None on a rank that gets nothing.

    Raises:
        InputError: the ranks do not hold each element once, or not the same states; names one. A ValueError. Raised
            on all ranks, before anything is sent.
        RankError: another rank has ended, or has not come within the timeout; names it. A RuntimeError.
    """
    ranks = JointWork.of(group, PURPOSE, "gather_full", timeout_for(state, timeout_s))
    with ranks.doing("gather_full"):
        return _gather(state, ranks, dst)


def _gather(state: Any, ranks: JointWork, dst: int | None) -> Any:
    leaves = dict(_leaves(state, "state"))
    held = [_Held.of(name, leaf) for name, leaf in leaves.items()]
    by_rank = ranks.each(lambda: held)
    owners = _owners(by_rank, ranks)  # raises the same on all ranks: all have the same words
    receives = dst is None or dst == ranks.rank
    whole: dict[str, torch.Tensor] = {}
    for number, (name, leaf) in enumerate(leaves.items()):
        ranks.meet()  # or a rank would wait for its turn as long as all before it take
        full = torch.empty(leaf.shape, dtype=leaf.dtype) if receives else None
        for held_range in owners[number]:
            _move(leaf, full, held_range, ranks, dst)
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


def _move(leaf: ShardedState, full: torch.Tensor | None, held: _Range, ranks: JointWork, dst: int | None) -> None:
    """A range from its owner into `full`, which ranks that get it have."""
    mine = None
    if held.owner == ranks.rank:
        mine = next(part.values for part in leaf.parts if part.start == held.start)
    step = max(1, CHUNK_BYTES // leaf.dtype.itemsize)
    for start in range(held.start, held.stop, step):
        stop = min(start + step, held.stop)
        chunk = None if mine is None else mine[start - held.start : stop - held.start].detach()
        # Of a whole tensor, the receiver's memory is the message's: nothing is copied on the way.
        into = full.view(-1)[start:stop] if full is not None and held.within.sizes == tuple(full.shape) else None
        if into is not None and chunk is not None:
            into.copy_(chunk)
        if chunk is None and full is not None:
            chunk = torch.empty(stop - start, dtype=leaf.dtype) if into is None else into
        if chunk is None:
            continue
        _send(chunk, held.owner, ranks, dst)
        if full is not None and into is None:
            for box in held.within.boxes(start, stop):
                full[box.slices].copy_(chunk[box.start - start : box.stop - start].view(box.sizes))


def _send(chunk: torch.Tensor, owner: int, ranks: JointWork, dst: int | None) -> None:
    """From the owner's memory into that of those who get it."""
    if ranks.group is None or owner == dst:
        return
    with ranks.talking():
        if dst is None:
            dist.broadcast(chunk.view(torch.uint8), group=ranks.group, group_src=owner)
            return
        if ranks.rank == dst:
            message = dist.irecv(chunk.view(torch.uint8), group=ranks.group, group_src=owner)
        else:
            message = dist.isend(chunk.view(torch.uint8), group=ranks.group, group_dst=dst)
        assert message is not None
        if ranks.timeout is None:
            message.wait()
        else:  # gloo takes no later one for single messages than that of the group's beginning
            message.wait(ranks.timeout)


def _owners(by_rank: list[list[_Held]], ranks: JointWork) -> list[list[_Range]]:
    """Of each state, its ranges in order with the rank that holds each."""
    first = [(held.name, held.shape, held.dtype) for held in by_rank[0]]
    for rank, states in enumerate(by_rank):
        others = [(held.name, held.shape, held.dtype) for held in states]
        if others != first:
            mine, theirs = next(pair for pair in zip_longest(first, others) if pair[0] != pair[1])
            names = f"rank {ranks.in_world(0)} and rank {ranks.in_world(rank)}"
            raise InputError(f"{names} hold different states: {mine} and {theirs}")
    return [
        _owners_of(name, shape, [states[number] for states in by_rank]) for number, (name, shape, _) in enumerate(first)
    ]


def _owners_of(name: str, shape: tuple[int, ...], by_rank: list[_Held]) -> list[_Range]:
    """The slices make up the tensor, and the ranges of each slice make up the slice."""
    slices = list(dict.fromkeys(held.within for held in by_rank if held.within.numel))
    for number, one in enumerate(slices):
        if other := next((other for other in slices[:number] if other.overlaps(one)), None):
            raise InputError(f"ranks hold slices of {name} that overlap, {other} and {one}")
    if (held := sum(one.numel for one in slices)) != prod(shape):
        raise InputError(f"no rank holds {prod(shape) - held} of the {prod(shape)} elements of {name}")
    owners: list[_Range] = []
    for one in slices:
        whose = enumerate(by_rank)
        ranges = sorted((*ends, rank) for rank, held in whose if held.within == one for ends in held.ranges)
        place = name if one.sizes == shape else f"{one} of {name}"
        at = 0
        for start, stop, _ in [*ranges, (one.numel, one.numel, 0)]:
            if start != at:
                fault, advice = ("no rank holds", "") if start > at else ("two ranks hold", f": {USE_GROUP}")
                raise InputError(f"{fault} elements [{min(start, at)}, {max(start, at)}) of {place}{advice}")
            at = stop
        owners += [_Range(one, *found) for found in ranges]
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
