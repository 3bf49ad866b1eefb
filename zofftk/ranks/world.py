"""The world of torch.distributed: whether there is one, and what ranks are called in messages.

That is by their numbers in the world, whichever group has found the fault.
"""

from __future__ import annotations

import torch.distributed as dist


def has_world() -> bool:
    return dist.is_available() and dist.is_initialized()


def in_world(rank: int, group: dist.ProcessGroup | None) -> int:
    """The number in the world of the rank that has this number in `group`; None: there is no world but this process."""
    return rank if group is None else dist.get_global_rank(group, rank)
