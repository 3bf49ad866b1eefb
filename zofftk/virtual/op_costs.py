"""What an operation of torch costs, from its tensors: floating-point operations, elements and bytes.

Operations are counted by torch's own flop counter. Its list leaves out the attention that torch calls on the CPU, which
is where fake tensors are; those formulas are filled in with the counter's own for the same operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


@dataclass(frozen=True)
class OpCost:
    flops: int
    elements: int  # read and written
    nbytes: int
    wide: bool  # on elements of 32 bits or more


def _attention(args: Sequence[Any]) -> int:
    query, key, value = args[:3]
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(args: Sequence[Any]) -> int:
    grad, query, key, value = args[:4]
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


_ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_UNTOUCHED = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.resize_}


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    packet = func.overloadpacket
    if (formula := _ON_CPU.get(packet)) is not None:
        return formula(args)
    if (counted := flop_registry.get(packet)) is not None:
        return int(counted(*args, **kwargs, out_val=out))
    return 0


def exchanged_bytes(func: Any, read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> int | None:
    """What a collective between the slices of a layer moves round a ring, as if each part were moved once.

    None for what is no collective. Sums that all receive go round twice.
    """
    if func.namespace != "_c10d_functional":
        return None
    nbytes = max((tensor.numel() * tensor.dtype.itemsize for tensor in (*read, *made)), default=0)
    return 2 * nbytes if "all_reduce" in func._schema.name else nbytes


def cost_of(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, tensors: Sequence[torch.Tensor]
) -> OpCost | None:
    """Of an operation that has made `out`; `tensors` are all it reads or writes. None if it touches no memory."""
    if func.overloadpacket in _UNTOUCHED:
        return None
    return OpCost(
        flops=flops_of(func, args, kwargs, out),
        elements=sum(tensor.numel() for tensor in tensors),
        nbytes=sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors),
        wide=any(tensor.dtype.itemsize >= 4 and tensor.is_floating_point() for tensor in tensors),
    )
