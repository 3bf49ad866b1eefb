"""Work that ranks do together, and hear of from one another: what fails on one rank is raised on all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zofftk.errors import RankGoneError
from zofftk.ranks.own_group import make_group
from zofftk.ranks.reasons import short_reason
from zofftk.ranks.world import in_world

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Failure:
    rank: int
    error: Exception


@dataclass(frozen=True)
class JointWork:
    """Some ranks, over gloo; or this process alone, where no collective is called.

    Every method is a collective: all ranks call the same one. Raises RankError where another rank has ended.
    """

    group: Any  # a process group; None where there is one rank
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None, purpose: str) -> JointWork:
        """The ranks of `group`; None means all of them, and this process where torch.distributed is not in use.

        They get a process group of their own for each `purpose`, since two threads must not use one at the same time.
        It is made at the first call, which is a collective, and lives as long as `group`.
        """
        if not dist.is_available() or not dist.is_initialized():
            return JointWork(None, 0, 1)
        group = group or dist.group.WORLD
        if group is None or dist.get_rank(group) < 0:
            raise ValueError("this rank is not in the group")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1:
            return JointWork(None, 0, 1)
        groups = _groups.setdefault(group, {})
        if purpose not in groups:
            ranks = dist.get_process_group_ranks(group)
            groups[purpose] = make_group(ranks, timeout=_timeout_of(group), backend="gloo")
        return JointWork(groups[purpose], rank, size)

    def each(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, in their order, on all ranks."""
        outcome = self._outcome(work)
        outcomes: list[Any] = [outcome] * self.size
        if self.group is not None:
            with talking():
                dist.all_gather_object(outcomes, outcome, group=self.group)
        return self._values(outcomes, outcome)

    def first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, which alone does it, on all ranks."""
        outcomes: list[Any] = [self._outcome(work) if self.rank == 0 else None]
        own = outcomes[0]
        if self.group is not None:
            with talking():
                dist.broadcast_object_list(outcomes, group=self.group, group_src=0)
        return self._values(outcomes, own)[0]

    def through_first(self, work: Callable[[], T], answer: Callable[[list[T]], Sequence[R]]) -> R:
        """`work` on each rank; rank 0 makes of what they give an answer to each."""
        outcome = self._outcome(work)
        if self.group is None:
            return answer(self._values([outcome], outcome))[0]
        outcomes: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with talking():
            dist.gather_object(outcome, outcomes, group=self.group, group_dst=0)
        answers: list[Any] | None = None
        if outcomes is not None:
            failed = next((each for each in outcomes if isinstance(each, _Failure)), None)
            answered = failed or self._outcome(lambda: answer(outcomes))
            answers = [answered] * self.size if isinstance(answered, _Failure) else list(answered)
            outcome = answers[0]
        mine: list[Any] = [None]
        with talking():
            dist.scatter_object_list(mine, answers, group=self.group, group_src=0)
        return self._values(mine, outcome)[0]

    def in_world(self, rank: int) -> int:
        return in_world(rank, self.group)

    def _outcome(self, work: Callable[[], T]) -> T | _Failure:
        try:
            return work()
        except Exception as error:
            return _Failure(self.rank, error if self.size == 1 else _picklable(error))

    def _values(self, outcomes: list[Any], own: Any) -> list[Any]:
        """Raises the first rank's failure; `own` is this rank's outcome, whose error has its traceback still."""
        for outcome in outcomes:
            if isinstance(outcome, _Failure):
                if isinstance(own, _Failure) and own.rank == outcome.rank:
                    raise own.error
                outcome.error.add_note(f"(on rank {self.in_world(outcome.rank)})")
                raise outcome.error
        return outcomes


# By the users' groups. A key goes with its group, and the groups of a world that has ended with it.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = WeakKeyDictionary()


def _timeout_of(group: Any) -> timedelta | None:
    """Torch gives a new group its own default, whatever the others were told to wait."""
    for device in group._device_types:
        return getattr(group._get_backend(device).options, "_timeout", None)
    return None


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def talking() -> Iterator[None]:
    """Around a collective: says what its error means."""
    try:
        yield
    except RuntimeError as error:
        raise RankGoneError(f"another rank has ended, or does not answer ({short_reason(error)})") from error
