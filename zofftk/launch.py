"""This process among those that `torchrun` has started; without it, one process alone."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from zofftk.errors import InputError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Launch:
    """One process alone; `zofftk.launched_ranks` has the same for many. `tp` ranks share each slice of the batch."""

    rank = local_rank = 0
    size = local_size = dp = tp = 1
    data_rank = 0  # whose slice of the batch this rank takes
    process_group: Any = None  # the ranks with other slices of the batch; None: the optimizer sees by itself
    mesh: Any = None  # the ranks with other slices of the parameters
    timeout_s: float | None = None

    def each(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank; what it raises on one is raised on all."""
        return [work()]

    def here(self, work: Callable[[], T]) -> T:
        """What `work` gives on this rank, once it has gone well on all."""
        given: list[T] = []
        self.each(lambda: given.append(work()))
        return given[0]

    def first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, which alone does it; what it raises is raised on all."""
        return work()

    def build_meshes(self, device: torch.device) -> None:
        """Who works with whom; a collective."""

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Around what waits for other ranks: where they fail, RankError says which one and why."""
        yield

    def mean_loss(self, loss: float, *, stop: bool) -> tuple[float, bool]:
        """Over all ranks; and whether another one has been asked to stop, or this one."""
        return loss, stop

    def leave(self, error: BaseException) -> None:
        """Tell the others why, before this process ends."""

    def describe(self) -> dict[str, int]:
        return {"ranks": self.size, "data_parallel": self.dp, "tensor_parallel": self.tp}

    @contextmanager
    def closing(self, optimizer: Any) -> Iterator[None]:
        """Closes it at the end. Where there are other ranks, a failure leaves it: to close it may wait for them."""
        try:
            yield
        except BaseException:
            if self.size == 1:
                optimizer.close()
            raise
        optimizer.close()


@contextmanager
def launched(
    *, tp: int, timeout_s: float | None, device: str, explain: Callable[[BaseException, str], int | None]
) -> Iterator[Launch]:
    """The ranks, for as long as the block runs.

    Among many, what the block raises ends the process at once, with the exit code that `explain` gives after it has
    printed the error: to tidy up could wait for ranks that wait for this one.
    """
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        check_options(size, tp, timeout_s)
        yield Launch()
        return
    rank = _number("RANK", 0)
    ranks, is_known = Launch(), True  # to all ranks alike
    try:
        check_options(size, tp, timeout_s)
        is_known = False
        from zofftk.launched_ranks import LaunchedRanks

        ranks = LaunchedRanks(rank, size, tp=tp, timeout_s=timeout_s, device=device)
        yield ranks
        ranks.close()
    except BaseException as error:
        is_known = is_known or getattr(error, "is_known_to_all", False)
        ranks.leave(error)
        _end(error, explain, rank, says=rank == 0 or not is_known)


def check_options(size: int, tp: int, timeout_s: float | None) -> None:
    if tp < 1 or size % tp:
        raise InputError(f"--tp: expected a divisor of the number of ranks, which is {size}, got {tp}")
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise InputError(f"--rank-timeout: expected a number of seconds above 0, got {timeout_s}")


def _end(error: BaseException, explain: Callable[[BaseException, str], int | None], rank: int, *, says: bool) -> None:
    if not says:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the process ends here
    code = explain(error, f"zofftk, rank {rank}")
    if code is None:
        traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, str(default))
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < 0:
        raise InputError(f"{variable}: expected a whole number, as torchrun sets it, got {value!r}")
    return number
