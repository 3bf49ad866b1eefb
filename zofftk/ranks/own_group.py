"""Process groups of our own, which the ranks make without those that are not in them.

torch derives the name by which ranks meet from how many groups each of them has. Where they have made different numbers
before (a rank is not counted into groups of others), they would wait for one another under different names. So they
first tell each other their numbers, and who has fewer makes groups of itself alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zofftk.errors import RankGoneError

_c10d: Any = dist.distributed_c10d
# How many have been made of the same ranks, in this world.
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def make_group(ranks: Sequence[int], *, timeout: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    """A group of these ranks of the world, all of which call it, for them in the same order as other calls."""
    numbers = _tell_numbers(tuple(ranks), timeout or _c10d.default_pg_timeout)
    for _ in range(_number_of_groups(), max(numbers)):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _number_of_groups() -> int:
    return len(_c10d._world.pg_names)


def _tell_numbers(ranks: tuple[int, ...], timeout: timedelta) -> list[int]:
    """How many groups each of the ranks has."""
    made = _made.setdefault(_c10d._get_default_group(), Counter())
    made[ranks] += 1
    place = f"zofftk/groups/{'_'.join(map(str, ranks))}/{made[ranks]}"
    store, own = _c10d._get_default_store(), dist.get_rank()
    keys = {rank: f"{place}/{rank}" for rank in ranks}
    store.set(keys[own], json.dumps(_number_of_groups()))
    numbers = []
    for rank, key in keys.items():
        try:
            store.wait([key], timeout)
            numbers.append(json.loads(store.get(key)))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RankGoneError(
                f"rank {own} has waited for rank {rank}, which has not come to make their process group: every rank "
                f"has to make the same calls ({reason})"
            ) from error
    return numbers
