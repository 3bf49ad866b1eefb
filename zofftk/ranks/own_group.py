"""Process groups of our own, which the ranks make without those that are not in them.

torch derives the name by which ranks meet from how many groups each of them has. Where they have made different numbers
before (a rank is not counted into groups of others), they would wait for one another under different names. So they
first tell each other their numbers, and who has fewer makes groups of itself alone.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zofftk.errors import RankGoneError, StoreSilentError
from zofftk.ranks.patience import ANSWER_S, GRACE_S, LOST, PatientStore, within
from zofftk.ranks.reasons import short_reason

_c10d: Any = dist.distributed_c10d
# How many have been made of the same ranks, in this world.
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def make_group(ranks: Sequence[int], *, timeout: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    """A group of these ranks of the world, all of which call it, for them in the same order as other calls."""
    limit_s = (timeout or _c10d.default_pg_timeout).total_seconds()
    meeting = _Meeting(tuple(ranks), limit_s)

    def make(numbers: list[int]) -> Any:
        for _ in range(_number_of_groups(), max(numbers)):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)

    try:
        numbers = meeting.tell_numbers()
        group = within(limit_s + GRACE_S, lambda: make(numbers), meeting.look)
    except RuntimeError as error:
        raise meeting.failure(error) from error
    finally:
        meeting.close()
    assert isinstance(group, dist.ProcessGroup)
    return group


def _number_of_groups() -> int:
    return len(_c10d._world.pg_names)


class _Meeting:
    """Of ranks that make one group. Each says in the store how many it has; and if it gives up, whom it waited for."""

    def __init__(self, ranks: tuple[int, ...], limit_s: float) -> None:
        made = _made.setdefault(_c10d._get_default_group(), Counter())
        made[ranks] += 1
        place = f"zofftk/groups/{'_'.join(map(str, ranks))}/{made[ranks]}"
        self._keys = {rank: f"{place}/{rank}" for rank in ranks}
        self._own, self._limit_s = dist.get_rank(), limit_s
        # A store that is busy is not to be taken for one that has stopped.
        self._store = PatientStore(_c10d._get_default_store(), max(ANSWER_S, limit_s / 2))

    def close(self) -> None:
        self._store.close()

    def tell_numbers(self) -> list[int]:
        """How many groups each of the ranks has."""
        self._say(_number_of_groups())
        deadline = time.monotonic() + self._limit_s
        return [self._hear(rank, deadline) for rank in self._keys]

    def look(self) -> None:
        """Raises StoreSilentError where the store does not answer; what else fails, those who use it will say."""
        try:
            self._store.get(self._keys[self._own])
        except StoreSilentError:
            raise
        except RuntimeError:
            pass

    def failure(self, error: RuntimeError) -> RankGoneError:
        """What it means that the group could not be made."""
        if isinstance(error, RankGoneError) and not isinstance(error, StoreSilentError):
            return error
        if not isinstance(error, StoreSilentError):
            try:
                for rank in self._keys:
                    self._word(rank)
            except RankGoneError as cause:
                if not isinstance(cause, StoreSilentError):
                    return cause
            except RuntimeError:  # the store is gone
                return RankGoneError(
                    f"rank {self._own} {LOST}, while it made a process group of ranks {list(self._keys)} "
                    f"({short_reason(error)})"
                )
        return RankGoneError(
            f"rank {self._own} cannot make a process group of ranks {list(self._keys)}: {short_reason(error)}"
        )

    def _hear(self, rank: int, deadline: float) -> int:
        # Asked for again and again: a store that is told to wait cannot be told from one that does not answer.
        pause_s = 0.002
        while (number := self._word(rank)) is None:
            if time.monotonic() > deadline:
                self._say({"waited_for": rank})
                raise RankGoneError(
                    f"rank {self._own} has waited {self._limit_s:g} s for rank {rank}, which has not come to make "
                    "their process group: every rank has to make the same calls"
                )
            time.sleep(pause_s)
            pause_s = min(0.1, 2 * pause_s)
        return number

    def _word(self, rank: int) -> int | None:
        """Raises RankGoneError where it has given up."""
        word = self._store.get(self._keys[rank])
        said = None if word is None else json.loads(word)
        if isinstance(said, dict) and rank != self._own:
            late = said["waited_for"]
            whom = "it" if late == self._own else f"rank {late}"
            raise RankGoneError(
                f"rank {self._own} has come to make a process group when rank {rank} had given up, which has waited "
                f"for {whom} {self._limit_s:g} s"
            )
        return None if isinstance(said, dict) else said

    def _say(self, word: object) -> None:
        self._store.set(self._keys[self._own], json.dumps(word))
