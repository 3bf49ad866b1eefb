"""What a user may hand to an optimizer: checked at the door, each error naming what was expected and what came."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zofftk.memory_overlap import Place, overlapping, overlaps_itself
from zofftk.ranks.slices import check_placement, is_sliced, local_of

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parameter_name(group: dict[str, Any], group_number: int, number: int) -> str:
    names = group.get("param_names") or []
    return repr(names[number]) if number < len(names) else f"parameter {number} of group {group_number}"


def check_param(param: torch.Tensor, name: str) -> None:
    check_is_plain(param, name)
    check_placement(param, name)
    if torch.nn.parameter.is_lazy(param):
        raise TypeError(f"{name} is not initialised yet, expected a tensor with data: run a forward before")
    if param.layout != torch.strided:
        raise TypeError(f"{name} is {param.layout}, expected a dense tensor")
    if param.dtype not in PARAM_DTYPES:
        raise TypeError(f"{name} is {param.dtype}, expected one of {', '.join(str(d) for d in PARAM_DTYPES)}")
    if param.is_inference():
        raise ValueError(f"{name} is an inference tensor, which cannot be trained: create it outside inference_mode")
    if param.is_neg() or param.is_conj():
        raise ValueError(f"{name} is a negated or conjugated view, expected a tensor of its own: use resolve_neg()")
    if param.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, expected a tensor with data: materialise the model first")


def check_is_plain(param: torch.Tensor, name: str) -> None:
    """Memory of its own: a class that answers torch's operations itself keeps its elements where only it knows."""
    cls: Any = type(param)
    plain = cls.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    if not plain and not isinstance(param, FakeTensor) and not is_sliced(param):
        raise TypeError(
            f"{name} is a {cls.__name__}, a class with a __torch_dispatch__ of its own, expected a plain tensor or "
            "torch.nn.Parameter, or the DTensor of parallelize_module or fully_shard"
        )


def check_gradient(grad: torch.Tensor, name: str) -> None:
    """A dense tensor of real floating-point numbers, as autograd delivers it or a user has put it into `p.grad`."""
    if grad.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name} is {grad.layout}, expected a dense one: build its embedding with sparse=False"
        )
    if not grad.is_floating_point():
        raise TypeError(f"the gradient of {name} is {grad.dtype}, expected real floating-point numbers")


def check_memory(params: list[torch.Tensor], names: list[str]) -> None:
    """No two elements of the parameters share memory: each has a master of its own that would overwrite the other."""
    here = [(local_of(param), name) for param, name in zip(params, names, strict=True)]
    real = [(param, name) for param, name in here if not isinstance(param, FakeTensor)]
    for param, name in real:
        if overlaps_itself(param):
            raise ValueError(f"{name} is expanded, so that its elements share memory: expected a tensor of its own")
    if pair := overlapping([Place(name, param, written=True) for param, name in real]):
        one, other = sorted(place.name for place in pair)
        raise ValueError(f"{one} and {other} share memory: expected one Parameter object for tied weights")


def check_options(group: dict[str, Any]) -> None:
    """Options of torch's optimizers that would change the update."""
    for key in ("amsgrad", "maximize", "differentiable"):
        if group.get(key):
            raise ValueError(f"{key} is an option of torch's that is not offered here, expected it to be False")


def check_number(group: dict[str, Any], key: str) -> None:
    """A hyper-parameter: a float or a tensor of one element."""
    value = group[key]
    if not isinstance(value, numbers.Real | torch.Tensor):
        raise TypeError(f"{key} must be a number, got {value!r}")
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{key} must be one number, got a tensor of shape {tuple(value.shape)}")


def check_at_least_0(group: dict[str, Any], *keys: str) -> None:
    for key in keys:
        check_number(group, key)
        if not float(group[key]) >= 0.0:
            raise ValueError(f"{key} must be 0 or more, got {group[key]!r}")


def check_betas(group: dict[str, Any]) -> None:
    betas = tuple(group["betas"])
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {group['betas']!r}")
