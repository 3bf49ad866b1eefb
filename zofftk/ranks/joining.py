"""Ranks begin with the same parameters: they compare what they have, and take the first rank's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zofftk.errors import RankError
from zofftk.ranks.slices import local_of

PARAMETERS = "do not train the same parameters"


def check_same(described: Sequence[object], group: dist.ProcessGroup, what: str = PARAMETERS) -> None:
    """Raises RankError, on all ranks, where they describe what they have in other words; `what` says what that is."""
    others: list[Sequence[object]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(others, list(described), group=group)
    names = dist.get_process_group_ranks(group)
    for name, other in zip(names, others, strict=True):
        if other != others[0]:
            difference = _difference(others[0], other)
            raise RankError(f"ranks {names[0]} and {name} {what}: {difference}")


def take_firsts(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """What the first rank has in its memory of these becomes what all have."""
    first = dist.get_global_rank(group, 0)
    for tensor in tensors:
        local = local_of(tensor).detach()
        values = local.clone(memory_format=torch.contiguous_format)
        dist.broadcast(values, first, group=group)
        # What need not be written to is not: a backward may want to read a parameter that was unfrozen before it.
        if not torch.equal(_bits(values), _bits(local)):
            local.copy_(values)
            torch.autograd.graph.increment_version(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _difference(first: Sequence[object], other: Sequence[object]) -> str:
    if len(first) != len(other):
        return f"one has {len(first)}, the other {len(other)}"
    return next(f"{a} and {b}" for a, b in zip(first, other, strict=True) if a != b)
