"""A parameter whose new value is on its way lands it the moment anything reads it.

From `step()` until its value has arrived, the parameter is an instance of a subclass of its own class. Torch shows such
a subclass every operation on it, so whoever reads the parameter, or writes it, by whatever path and from wherever, gets
its new value first. Questions that do not touch the values, such as those for its shape or its gradient, pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

Land = Callable[[], None]

_ATTRIBUTES = (
    "_backward_hooks _post_accumulate_grad_hooks _version device dtype grad grad_dtype grad_fn is_cpu is_cuda "
    "is_leaf is_meta is_nested is_quantized is_sparse itemsize layout names nbytes ndim output_nr requires_grad "
    "retains_grad shape"
)
_METHODS = (
    "__len__ dim element_size get_device is_complex is_contiguous is_floating_point is_inference ndimension nelement "
    "numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride"
)
# These do not come by __torch_function__; the first two look at the class and the attributes before they read.
_UNSEEN = [
    *("__deepcopy__", "__reduce_ex__", "__iter__", "_lazy_clone", "_typed_storage", "_view_func", "as_subclass", "new"),
    *("new_tensor", "set_", "unflatten", "to_sparse_coo"),
    *(f"{prefix}to_sparse{layout}" for prefix in ("", "_") for layout in ("_bsc", "_bsr", "_csc", "_csr")),
]
_FUNCTIONS = "is_complex is_floating_point is_inference is_tensor numel"


def _quiet() -> set[Any]:
    """What torch calls without a look at the values."""
    quiet = {getattr(torch.Tensor, name) for name in _METHODS.split()}
    quiet |= {getattr(torch, name) for name in _FUNCTIONS.split()}
    for name in _ATTRIBUTES.split():
        if (attribute := getattr(torch.Tensor, name, None)) is not None:  # not every torch has all of them
            accessors = (getattr(attribute, method, None) for method in ("__get__", "__set__", "__delete__"))
            quiet |= {accessor for accessor in accessors if accessor is not None}
    return quiet


_QUIET = _quiet()
_PENDING: dict[type, type[Any]] = {}  # of a class of parameters, its subclass for those that wait
_LAND = "_zofftk_land"


def mark(tensor: torch.Tensor, land: Land) -> bool:
    """Have `land` called before the next read of `tensor`; it calls `unmark`. False: this class cannot be watched."""
    cls: Any = type(tensor)
    is_plain = cls.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    if not is_plain and not issubclass(cls, FakeTensor):
        return False  # a wrapper: what it wraps can be read past it
    try:
        setattr(tensor, _LAND, land)
        tensor.__class__ = _subclass(cls)
    except (AttributeError, TypeError):
        return False
    return True


def is_pending(value: object) -> bool:
    return getattr(type(value), "_is_pending", False)


def unmark(tensor: torch.Tensor) -> None:
    """The value has arrived, or never will."""
    if is_pending(tensor):
        tensor.__class__ = type(tensor).__bases__[0]
        vars(tensor).pop(_LAND, None)


def _subclass(cls: type) -> type[Any]:
    if cls not in _PENDING:
        members = {
            "_is_pending": True,
            "__module__": __name__,
            "__torch_function__": classmethod(torch.compiler.disable(_land_and_go_on)),
            "__new__": lambda pending, *args, **kwargs: cls(*args, **kwargs),  # somebody makes another of p's type
            **{name: _landing(name) for name in _UNSEEN if hasattr(cls, name)},
        }
        _PENDING[cls] = type(cls)(f"Pending{cls.__name__}", (cls,), members)
    return _PENDING[cls]


def _landing(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(_landed(self), name)(*args, **kwargs)


def _landed(value: Any) -> Any:
    if is_pending(value) and (land := getattr(value, _LAND, None)) is not None:  # else another thread was quicker
        land()
    return value


def _land_and_go_on(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func in _QUIET:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for leaf in _pytree.tree_leaves((args, kwargs)):
        _landed(leaf)
    return func(*args, **kwargs)
