"""torch.distributed's collectives on flat tensors, under the names that the installed torch has for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 has renamed them, and warns under the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """`whole` becomes the parts of all ranks; `part` may lie in it, in its own place."""
    _all_gather(whole, part, group=group)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """`part` becomes this rank's range of the sum over ranks; it may lie in `whole`, in its own place."""
    _reduce_scatter(part, whole, group=group)


def reduce_to_own(own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """As `reduce_scatter`, where fp16 holds the mean and not the sum; a `whole` of a wider dtype is summed in that,
    and rounded once into `own`, which lies outside of this rank's own range then."""
    is_fp16, size = own.dtype == torch.float16, dist.get_world_size(group)
    if own.dtype == whole.dtype:
        if is_fp16:
            whole.div_(size)
        reduce_scatter(own, whole, group)
        return
    part = whole.view(size, -1)[dist.get_rank(group)]
    reduce_scatter(part, whole, group)
    own.copy_(part.div_(size) if is_fp16 else part)
