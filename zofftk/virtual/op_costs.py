"""What an operation of torch costs, from its tensors: floating-point operations, elements and bytes.

Operations are counted by torch's own flop counter. Its list leaves out the attention that torch calls on the CPU, which
is where fake tensors are; those formulas are filled in with the counter's own for the same operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    wide: bool  # on operands of 32 bits or more
    is_attention: bool  # in one operation


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
        wide=_is_wide(tensors),
        is_attention="scaled_dot_product" in func._schema.name,
    )


def _is_wide(tensors: Sequence[torch.Tensor]) -> bool:
    """By its first operand: attention on 16 bits keeps statistics in 32."""
    first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    return first is not None and first.dtype.itemsize >= 4


def tensors_in(values: Any, kind: type[torch.Tensor] = torch.Tensor) -> Iterator[torch.Tensor]:
    """Those of this kind among what an operation takes or returns."""
    if isinstance(values, kind):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value, kind)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()), kind)
