"""A process group that nobody else uses, on the stream of collectives, with an eye on its members."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zofftk.device.base import Buffer, Device
from zofftk.ranks.watch import Watch


class RankGroup:
    """Of these ranks of the world, all of which build it at the same time.

    A group of our own: what callers send through theirs comes in no fixed order with what is sent here.
    """

    def __init__(self, device: Device, ranks: Sequence[int], timeout_s: float | None) -> None:
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        self.process_group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.members: Sequence[int] = dist.get_process_group_ranks(group)  # by their numbers in the world
        self._device = device
        store: Any = dist.distributed_c10d._get_default_store()
        signs = dist.distributed_c10d.PrefixStore(f"zofftk/{group.group_name}", store)
        self._watch = Watch(signs, dist.get_rank(), self.members)
        device.open_comm()

    def collective(self, label: str, operation: Callable[[Any, Any, Any], None], dst: Buffer, src: Buffer) -> None:
        """On comm: `operation(dst, src, process_group)`; where it fails, RankError says why."""
        watch, group = self._watch, self.process_group

        def run(into: torch.Tensor, out_of: torch.Tensor) -> None:
            watch.at = label
            try:
                operation(into, out_of, group)
            except RuntimeError as error:
                raise watch.blame(error) from error

        self._device.collective(label, run, dst, src)

    def close(self) -> None:
        """The process group stays, as all do until torch.distributed ends: torch 2.13 names a new one by how many there
        are, so that after one was destroyed, the next may get the name of one that lives."""
        self._watch.close()
