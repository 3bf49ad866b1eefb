"""The ranks that share the states: those of a process group, or one alone."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import torch.distributed as dist

from zofftk.device.base import Device
from zofftk.ranks.one import OneRank, Ranks
from zofftk.threads import usable_threads

if TYPE_CHECKING:
    from zofftk.config import OffloadConfig


def open_ranks(config: OffloadConfig, device: Device) -> Ranks:
    """Of `config.process_group`, by default of all that `torch.distributed` knows."""
    group = config.process_group
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1:
        return OneRank(device)
    from zofftk.ranks.many import ManyRanks

    timeout = config.rank_timeout_s
    # A group of our own: what the caller sends through theirs comes in no fixed order with what is sent here.
    own = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=None if timeout is None else datetime.timedelta(seconds=timeout),
        use_local_synchronization=True,
    )
    assert isinstance(own, dist.ProcessGroup)
    return ManyRanks(device, own, config.threads or usable_threads())
