"""`DistributedDataParallel` around a model whose optimizer averages the gradients over ranks itself.

It would read each gradient when backward has finished it, to send it to the other ranks, but the gradient is on its way
to them then: the optimizer has taken it. So it is told not to, as it is inside of its own `no_sync()`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def leave_gradients(model: nn.Module, members: Sequence[int]) -> list[DistributedDataParallel]:
    """Have those in `model` leave the gradients to an optimizer that averages over `members` of the world.

    Returns those that have sent them so far. Raises ValueError where they average over others, or cannot do without.
    """
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for ddp in found:
        ranks = dist.get_process_group_ranks(ddp.process_group)
        if sorted(ranks) != sorted(members):
            raise ValueError(
                f"DistributedDataParallel is over ranks {ranks}, expected those that the optimizer averages gradients "
                f"over, {list(members)}: give both the same process_group"
            )
        if ddp.static_graph:
            raise ValueError(
                "DistributedDataParallel has static_graph=True, expected False: with it, it reads the gradients even "
                "where it does not send them"
            )
    sending = [ddp for ddp in found if ddp.require_backward_grad_sync]
    for ddp in sending:
        ddp.require_backward_grad_sync = False
    return sending


def take_gradients_back(sending: Sequence[DistributedDataParallel]) -> None:
    for ddp in sending:
        ddp.require_backward_grad_sync = True
