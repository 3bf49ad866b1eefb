"""Work that ranks do together, and hear of from one another: what fails on one rank is raised on all of them."""

from __future__ import annotations

import pickle
from collections import Counter
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
from zofftk.ranks.watch import Watch
from zofftk.ranks.world import has_world, in_world
from zofftk.sharding.touch import Touch

_c10d: Any = dist.distributed_c10d
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Failure:
    rank: int
    error: Exception


@dataclass(frozen=True)
class JointWork:
    """Some ranks, over gloo; or this process alone, where no collective is called.

    Every method is a collective: all ranks call the same one. Work may take as long as it likes, while the ranks keep
    in touch; where one ends, or does not come within the timeout, RankError names it.
    """

    group: Any  # a process group; None where there is one rank
    rank: int
    size: int
    timeout: timedelta | None = None
    watch: Watch | None = None

    @staticmethod
    def of(
        group: dist.ProcessGroup | None,
        purpose: str,
        call: str = "",
        timeout_s: float | None = None,
        *,
        has_signs: bool = True,
    ) -> JointWork:
        """The ranks of `group`; None means all of them, and this process where torch.distributed is not in use.

        They get a process group of their own for each `purpose`, since two threads must not use one at the same time.
        It is made at the first call, which is a collective, and lives as long as `group`.

        Args:
            group: see above.
            purpose: see above.
            call: what this rank does, for the others to name.
            timeout_s: how long to wait for a rank that does not come; None: as long as in `group`.
            has_signs: False where the caller has signs of life of its own, and finds out who a RankGoneError is about.
        """
        if not has_world():
            return JointWork(None, 0, 1)
        group = group or dist.group.WORLD
        if group is None or dist.get_rank(group) < 0:
            raise ValueError("this rank is not in the group")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1:
            return JointWork(None, 0, 1)
        timeout = _timeout_of(group) if timeout_s is None else timedelta(seconds=timeout_s)
        groups = _groups.setdefault(group, {})
        if purpose not in groups:
            ranks = dist.get_process_group_ranks(group)
            met = JointWork(None, rank, size, timeout, _watch(ranks, purpose) if has_signs else None)
            with met.doing(call), met.talking():
                groups[purpose] = make_group(ranks, timeout=timeout, backend="gloo"), met.watch
        own, watch = groups[purpose]
        if timeout is not None and timeout != _timeout_of(own):
            _c10d._set_pg_timeout(timeout, own)
        return JointWork(own, rank, size, timeout, watch)

    @contextmanager
    def doing(self, call: str) -> Iterator[None]:
        """What others who wait for this rank will say of it."""
        if self.watch is not None:
            self.watch.begin(call)
        try:
            yield
        finally:
            if self.watch is not None:
                self.watch.done()

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Around a collective: says what its error means, and who it is about."""
        try:
            with talking():
                yield
        except RankGoneError as error:
            if self.watch is None:
                raise
            raise self.watch.blame(error.__cause__ or error) from error

    def each(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, in their order, on all ranks."""
        outcome = self._together(work)
        outcomes: list[Any] = [outcome] * self.size
        if self.group is not None:
            with self.talking():
                dist.all_gather_object(outcomes, outcome, group=self.group)
        return self._values(outcomes, outcome)

    def here(self, work: Callable[[], T]) -> T:
        """What `work` gives on this rank, which the others need not know."""
        results: list[T] = []
        self.each(lambda: results.append(work()))
        return results.pop()

    def first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, which alone does it, on all ranks."""
        own: Any = self._together(work if self.rank == 0 else _nothing)
        outcomes = [own]
        if self.group is not None:
            with self.talking():
                dist.broadcast_object_list(outcomes, group=self.group, group_src=0)
        return self._values(outcomes, own)[0]

    def through_first(self, work: Callable[[], T], answer: Callable[[list[T]], Sequence[R]]) -> R:
        """`work` on each rank; rank 0 makes of what they give an answer to each."""
        outcome = self._together(work)
        if self.group is None:
            return answer(self._values([outcome], outcome))[0]
        outcomes: list[Any] = [None] * self.size
        with self.talking():
            dist.gather_object(outcome, outcomes if self.rank == 0 else None, group=self.group, group_dst=0)

        def answer_all() -> list[Any]:
            failed = next((each for each in outcomes if isinstance(each, _Failure)), None)
            answered = failed or self._outcome(lambda: answer(outcomes))
            return [answered] * self.size if isinstance(answered, _Failure) else list(answered)

        answers: Any = self._together(answer_all if self.rank == 0 else _nothing)
        if answers is not None:
            outcome = answers[0]
        mine: list[Any] = [None]
        with self.talking():
            dist.scatter_object_list(mine, answers, group=self.group, group_src=0)
        return self._values(mine, outcome)[0]

    def meet(self) -> None:
        """Wait until all are here, so that nobody waits for another's turn in what comes next."""
        self._together(_nothing)

    def _together(self, work: Callable[[], T]) -> T | _Failure:
        """What `work` gives here, when all ranks are done with theirs."""
        if self.group is None:
            return self._outcome(work)
        with Touch(self.group) as touch:
            outcome = self._outcome(work)
        with self.talking():
            touch.await_others()
        return outcome

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
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[Any, Watch | None]]] = WeakKeyDictionary()
# How many watches there have been of the same ranks for the same purpose, in this world.
_watches: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


def _watch(ranks: Sequence[int], purpose: str) -> Watch:
    """Before there is a group: also who does not come to make it has to be named."""
    place = f"zofftk/{purpose}/{'_'.join(map(str, ranks))}"
    counts = _watches.setdefault(_c10d._get_default_group(), Counter())
    counts[place] += 1
    store = _c10d.PrefixStore(f"{place}/{counts[place]}", _c10d._get_default_store())
    return Watch(store, dist.get_rank(), ranks)


def _nothing() -> Any:
    return None


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
