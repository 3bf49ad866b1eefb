"""What stands in `p.grad` while the gradient itself is on its way to the host.

A tensor subclass without storage, of the gradient's shape, dtype and device. It answers what training loops ask of
gradients by talking to the engine, and fails with a sentence on anything else, so that nothing is silently lost.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils import _pytree

from zofftk.config import OffloadConfig
from zofftk.validation import check_gradient

aten = torch.ops.aten


_DATA: Any = torch.Tensor.data


class StandInError(RuntimeError):
    """An operation on `p.grad` that needs the values, which are not there."""


class GradientOwner(Protocol):
    """What a stand-in asks of the engine, by the parameter's index."""

    config: OffloadConfig

    def name(self, index: int) -> str: ...
    def norm(self, index: int) -> float: ...
    def scale_gradient(self, index: int, factor: float) -> None: ...
    def zero_gradient(self, index: int) -> None: ...
    def add_gradient(self, index: int, grad: torch.Tensor) -> None: ...
    def copied_gradient(self, index: int) -> torch.Tensor | None: ...


class StandIn(torch.Tensor):
    """See the module."""

    owner: weakref.ref[GradientOwner]
    index: int
    is_converted = False  # made by `p.grad.float()` and the like: it answers, but does not change the gradient

    @staticmethod
    def __new__(cls, owner: GradientOwner, index: int, like: torch.Tensor, dtype: torch.dtype) -> StandIn:
        # In the layout autograd gives to gradients of `like`: it warns where it adds to one of another layout.
        strides = like.stride() if isinstance(like, StandIn) else torch.empty_like(like, device="meta").stride()
        self = torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=strides, dtype=dtype, device=like.device)
        self.owner = weakref.ref(owner)
        self.index = index
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            first = next(a for a in _pytree.tree_leaves((args, kwargs)) if isinstance(a, StandIn))
            raise first.refuse(func)
        return handler(*args, **(kwargs or {}))

    def change(self) -> GradientOwner:
        """The owner, for a change of the gradient."""
        if self.is_converted:
            raise self.refuse("changing a converted copy of p.grad")
        return self.ask()

    def ask(self) -> GradientOwner:
        owner = self.owner()
        if self.index < 0:
            raise StandInError("this gradient was dropped: another backward has put a new one in its place")
        if owner is None:
            raise StandInError("this gradient belongs to an optimizer that no longer exists")
        return owner

    def refuse(self, func: Any) -> StandInError:
        owner = self.owner()
        name = "a parameter" if owner is None or self.index < 0 else owner.name(self.index)
        if func in _READS_OF_DDP and torch._C._current_graph_task_id() >= 0:
            return StandInError(
                f"{func} reads the gradient of {name} inside backward, as DistributedDataParallel does to average it "
                "over ranks, which this optimizer does itself: hand the model over, with "
                "zofftk.offload(model, optimizer), or train the module inside of it"
            )
        return StandInError(
            f"{func} needs the values of the gradient of {name}, which have left for the host. Its p.grad answers "
            "norm (L2), mul_ and div_ by a number, add_, zero_, and the non-finite check of a GradScaler; "
            "read the values with optimizer.grad(p)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StandIn(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @property
    def data(self) -> StandIn:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, StandIn):
            raise StandInError("p.grad.data cannot be assigned: set a gradient with optimizer.set_grad(p, value)")
        _DATA.__set__(self, value)  # `model.bfloat16()` converts it with the parameter

    # These go round the dispatcher, straight to the memory that is not there.
    def tolist(self) -> Any:
        raise self.refuse("tolist")

    def numpy(self, *, force: bool = False) -> Any:
        raise self.refuse("numpy")

    def __dlpack__(self, **_: Any) -> Any:
        raise self.refuse("__dlpack__")

    def __dlpack_device__(self) -> Any:
        raise self.refuse("__dlpack_device__")

    def data_ptr(self) -> int:
        raise self.refuse("data_ptr")

    def untyped_storage(self) -> Any:
        raise self.refuse("untyped_storage")

    def share_memory_(self) -> Any:
        raise self.refuse("share_memory_")

    def is_shared(self) -> bool:
        return False

    def __array__(self, dtype: Any = None) -> Any:
        raise self.refuse("conversion to a numpy array")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refuse("pickling")

    def __deepcopy__(self, memo: Any) -> torch.Tensor | None:
        """Of a model that is copied between backward and the next: the gradient itself, or None where it was used."""
        return self.ask().copied_gradient(self.index)


# By which its reducer, or its communication hook, begins.
_READS_OF_DDP = (aten.mul.out, aten.div.out, aten.copy_.default)


def _number(func: Any, stand_in: StandIn, factor: Any) -> float:
    if isinstance(factor, torch.Tensor):
        if isinstance(factor, StandIn) or factor.numel() != 1:
            raise stand_in.refuse(f"{func} with a tensor of shape {tuple(factor.shape)}")
        return float(factor)
    return float(factor)


def _mul_(self: Any, factor: Any) -> Any:
    if not isinstance(self, StandIn):
        raise factor.refuse("multiplying by a gradient")
    self.change().scale_gradient(self.index, _number("mul_", self, factor))
    return self


def _div_(self: Any, divisor: Any) -> Any:
    if not isinstance(self, StandIn):
        raise divisor.refuse("dividing by a gradient")
    number = _number("div_", self, divisor)
    self.change().scale_gradient(self.index, 1.0 / number if number else math.copysign(math.inf, number))
    return self


def _add_(self: Any, other: Any, *, alpha: float = 1) -> Any:
    if not isinstance(self, StandIn) or not isinstance(other, torch.Tensor) or isinstance(other, StandIn):
        raise (self if isinstance(self, StandIn) else other).refuse("add_ with anything but a gradient")
    if other.shape != self.shape:
        raise self.refuse(f"add_ with a tensor of shape {tuple(other.shape)}")
    check_gradient(other, self.ask().name(self.index))
    self.change().add_gradient(self.index, other if alpha == 1 else other * alpha)
    return self


def _zero_(self: StandIn) -> StandIn:
    self.change().zero_gradient(self.index)
    return self


def _to_copy(self: StandIn, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> StandIn:
    """`model.bfloat16()` and the like, which convert `p.grad` with the parameter."""
    if device is not None and torch.device(device) != self.device:
        raise self.refuse(f"a copy to {device}")
    dtype = dtype or self.dtype
    copy = StandIn(self.ask(), self.index, self, torch.float32 if dtype == torch.float16 else dtype)
    copy.is_converted = True
    return copy


def _vector_norm(
    self: StandIn, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    if ord != 2 or dim is not None or keepdim:
        raise self.refuse("a norm other than the L2 norm of the whole gradient")
    # fp64, so that a norm of these norms is the engine's own.
    return torch.tensor(self.ask().norm(self.index), dtype=dtype or torch.float64, device=self.device)


def _norm(self: StandIn, p: float = 2) -> torch.Tensor:
    return _vector_norm(self, 2 if p is None else p)


def _for_each(inplace: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    """The in-place foreach operation, on stand-ins and on real tensors between them."""

    def apply(tensors: Any, factors: Any) -> None:
        each = factors if isinstance(factors, list | tuple) else [factors] * len(tensors)
        for tensor, factor in zip(tensors, each, strict=True):
            inplace(tensor, factor)

    return apply


def _foreach_mul_one(tensor: Any, factor: Any) -> None:
    tensor.mul_(factor)


def _foreach_div_one(tensor: Any, divisor: Any) -> None:
    tensor.div_(divisor)


def _foreach_zero_(tensors: Any) -> None:
    for tensor in tensors:
        tensor.zero_()


def _foreach_norm(tensors: Any, ord: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def _unscale_(tensors: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """`torch.amp.GradScaler.unscale_`: note non-finite gradients, divide the others by the loss scale."""
    for tensor in tensors:
        if isinstance(tensor, StandIn):
            if tensor.ask().config.loss_scale is not None:
                raise StandInError("the optimizer's option loss_scale and a GradScaler exclude each other: use one")
            if not torch.isfinite(torch.linalg.vector_norm(tensor)):
                found_inf.fill_(1.0)
            tensor.mul_(inv_scale)
        else:
            aten._amp_foreach_non_finite_check_and_unscale_([tensor], found_inf, inv_scale)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda self: self,
    aten._to_copy.default: _to_copy,
    aten.add_.Tensor: _add_,
    aten.mul_.Tensor: _mul_,
    aten.mul_.Scalar: _mul_,
    aten.div_.Tensor: _div_,
    aten.div_.Scalar: _div_,
    aten.zero_.default: _zero_,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._foreach_mul_.Tensor: _for_each(_foreach_mul_one),
    aten._foreach_mul_.Scalar: _for_each(_foreach_mul_one),
    aten._foreach_mul_.ScalarList: _for_each(_foreach_mul_one),
    aten._foreach_div_.Tensor: _for_each(_foreach_div_one),
    aten._foreach_div_.Scalar: _for_each(_foreach_div_one),
    aten._foreach_zero_.default: _foreach_zero_,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale_,
}
