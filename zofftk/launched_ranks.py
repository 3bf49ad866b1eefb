"""Many processes that train together: how they meet, agree, and learn of each other's end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zofftk.errors import InputError, RankError, RankGoneError
from zofftk.launch import Launch
from zofftk.ranks.patience import GRACE_S, within
from zofftk.ranks.reasons import named_reason, short_reason
from zofftk.ranks.watch import INTERVAL_S, Watch
from zofftk.sharding.joint_work import JointWork, talking

T = TypeVar("T")
_dist: Any = dist  # stores are not marked as exported
PURPOSE = "zofftk's command line"
NEEDED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")  # torchrun sets them


class LaunchedRanks(Launch):
    """See `Launch`. Meets the others, with torch.distributed initialised from torchrun's variables."""

    def __init__(self, rank: int, size: int, *, tp: int, timeout_s: float | None, device: str) -> None:
        if missing := [name for name in NEEDED if name not in os.environ]:
            raise InputError(f"WORLD_SIZE: expected {missing[0]} beside it, as torchrun sets them, got none")
        self.rank, self.size, self.tp, self.dp = rank, size, tp, size // tp
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        self.data_rank, self.timeout_s = rank // tp, timeout_s
        self._holds_store = False
        self._meet(device)

    def _meet(self, device: str) -> None:
        timeout = None if self.timeout_s is None else timedelta(seconds=self.timeout_s)
        self._limit_s = (timeout or dist.distributed_c10d.default_pg_timeout).total_seconds() + GRACE_S
        backend = "gloo" if device == "cpu" or not torch.cuda.is_available() else "cpu:gloo,cuda:nccl"
        if "nccl" in backend and self.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(self.local_rank)
        store = within(self._limit_s, lambda: self._open_store(timeout))
        # Signs of life come first: also who does not get through the start has to be named.
        self._watch = Watch(dist.distributed_c10d.PrefixStore("zofftk", store), self.rank, range(self.size))
        with self.at("the start"), talking():
            of = {"store": store, "rank": self.rank, "world_size": self.size, "timeout": timeout}
            within(self._limit_s, lambda: dist.init_process_group(backend, **of))
            self._talk = JointWork.of(None, PURPOSE, has_signs=False)

    def _open_store(self, timeout: timedelta | None) -> Any:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        try:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                return next(_dist.rendezvous("env://", timeout=timeout or dist.distributed_c10d.default_pg_timeout))[0]
            # As torch does it, but rank 0 does not wait here, where nobody could say who is missing.
            self._holds_store = self.rank == 0
            limit_s = dist.distributed_c10d.default_pg_timeout if timeout is None else timeout
            return _dist.TCPStore(address, int(port), self.size, self._holds_store, limit_s, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            where = f"rank 0, or the launcher, at {address}:{port}"
            raise RankError(f"rank {self.rank} cannot reach {where} ({short_reason(error)})") from error

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        self._watch.begin(place)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError) and not isinstance(error, RankGoneError):
                if self._watch.verdict is None:
                    raise
            elif not (isinstance(error, RankGoneError | dist.DistError) or _is_from_gloo(error)):
                raise
            raise self._watch.blame(error.__cause__ or error) from error

    def each(self, work: Callable[[], T]) -> list[T]:
        return self._agreed(lambda: self._talk.each(work))

    def first(self, work: Callable[[], T]) -> T:
        return self._agreed(lambda: self._talk.first(work))

    def _agreed(self, talk: Callable[[], Any]) -> Any:
        with self.at(self._watch.at):
            try:
                return talk()
            except Exception as error:
                error.is_known_to_all = not isinstance(error, RankGoneError)  # type: ignore[attr-defined]
                raise

    def build_meshes(self, device: torch.device) -> None:
        with self.at("the start"), talking():
            shape, names = (self.dp, self.tp), ("dp", "tp")
            mesh = within(self._limit_s, lambda: init_device_mesh(device.type, shape, mesh_dim_names=names))
        self.process_group = mesh["dp"].get_group()
        if self.tp > 1:
            self.mesh = mesh["tp"]

    def mean_loss(self, loss: float, *, stop: bool) -> tuple[float, bool]:
        # One message for both: all stop after the same step, whoever has heard of it.
        word = torch.tensor([loss / self.dp, float(stop)], dtype=torch.float64)
        with talking():
            dist.all_reduce(word, group=self._talk.group)
        return word[0].item(), word[1].item() > 0

    def leave(self, error: BaseException) -> None:
        own = f"rank {self.rank} has ended with {named_reason(error)}"
        self._watch.judge(str(error) if isinstance(error, RankError) else own)
        if self._holds_store:
            time.sleep(1.2 * INTERVAL_S)  # until all have heard it

    def close(self) -> None:
        """When all have come to their end: who leaves first would look as if it had died."""
        self.each(lambda: None)
        self._watch.close()
        self.each(lambda: None)  # rank 0 may hold the store that the watches write to
        dist.destroy_process_group()


def _is_from_gloo(error: RuntimeError) -> bool:
    """What torch's own collectives raise, which tensor parallelism uses in the model: nothing but a text."""
    return type(error) is RuntimeError and "gloo/" in str(error)
