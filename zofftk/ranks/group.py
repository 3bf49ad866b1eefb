"""A process group that nobody else uses, on the stream of collectives, with an eye on its members."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from zofftk.device.base import Buffer, Device
from zofftk.errors import RankError
from zofftk.ranks import joining
from zofftk.ranks.own_group import make_group
from zofftk.ranks.watch import Watch


class RankGroup:
    """Of these ranks of the world, all of which build it at the same time.

    A group of our own: what callers send through theirs comes in no fixed order with what is sent here.
    """

    def __init__(self, device: Device, ranks: Sequence[int], timeout_s: float | None) -> None:
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        self.process_group = group = make_group(ranks, timeout=timeout)
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.members: Sequence[int] = dist.get_process_group_ranks(group)  # by their numbers in the world
        self._device = device
        device.open_comm()
        store: Any = dist.distributed_c10d._get_default_store()
        signs = dist.distributed_c10d.PrefixStore(f"zofftk/{group.group_name}", store)
        # As torch does it: the launcher has the store, or the first rank.
        holds_store = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._watch = Watch(signs, dist.get_rank(), self.members, holds_store=holds_store)  # last: it has a thread

    def collective(self, label: str, operation: Callable[[Any, Any, Any], None], dst: Buffer, src: Buffer) -> None:
        """On comm: `operation(dst, src, process_group)`; where it fails, RankError says why."""

        def run(into: torch.Tensor, out_of: torch.Tensor) -> None:
            with self.at(label):
                operation(into, out_of, self.process_group)

        self._device.collective(label, run, dst, src)

    def check_same(self, described: Sequence[object], label: str, what: str = joining.PARAMETERS) -> None:
        """Raises RankError, on all ranks, where they describe what they have in other words; `what` says what that
        is."""
        with self.at(label):
            joining.check_same(described, self.process_group, what)

    def take_firsts(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        """What the first rank has in its memory of these becomes what all have."""
        with self.at(label):
            joining.take_firsts(tensors, self.process_group)

    def sum(self, values: torch.Tensor, label: str) -> None:
        """Over the ranks, in place; nothing else of this group is under way."""
        with self.at(label):
            dist.all_reduce(values, group=self.process_group)

    @contextmanager
    def at(self, label: str) -> Iterator[None]:
        """Around what waits for the others: where it fails, RankError says why."""
        self._watch.begin(label)
        try:
            yield
            self._watch.done()
        except RankError:
            raise
        except RuntimeError as error:
            raise self._watch.blame(error) from error

    def close(self) -> None:
        """The process group stays, as all do until torch.distributed ends: torch 2.13 names a new one by how many there
        are, so that after one was destroyed, the next may get the name of one that lives."""
        self._watch.close()
