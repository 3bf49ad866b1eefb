"""What may be handed to the one-tensor updates on the CPU: checked before anything changes, each error naming it."""

import operator
from typing import Any

import torch

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check_at_least_0(**numbers: Any) -> None:
    """Raise ValueError (TypeError for what is no number) naming the first that is below 0."""
    for name, value in numbers.items():
        if not as_number(name, value) >= 0.0:
            raise ValueError(f"{name}: expected 0 or more, got {value}")


def check_betas(betas: Any) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        if not 0.0 <= as_number(f"betas[{index}]", beta) < 1.0:
            raise ValueError(f"betas[{index}]: expected 0 <= beta < 1, got {beta}")


def check_threads(threads: Any) -> int:
    """The number of threads as an int; raises TypeError or ValueError where it cannot be one."""
    return whole("threads", threads, 31)


def as_number(name: str, value: Any) -> float:
    """Of anything but text that float() takes; raises TypeError."""
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None


def whole(name: str, value: Any, bits: int) -> int:
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):
        raise TypeError(f"{name}: expected a whole number, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name}: expected 1 or more, got {value}")
    if number >= 2**bits:
        raise ValueError(f"{name}: expected less than 2**{bits}, got {value}")
    return number


def check_tensors(states: dict[str, Any], grad: Any, out: Any) -> int:
    """Their number of elements, which is that of the first of the float32 `states`."""
    first = next(iter(states.values()))
    numel = first.numel() if isinstance(first, torch.Tensor) else 0
    for name, tensor in states.items():
        _check_tensor(name, tensor, (torch.float32,), numel)
    _check_tensor("grad", grad, tuple(DTYPE_NAMES), numel)
    if out is not None:
        _check_tensor("out", out, tuple(DTYPE_NAMES), numel)
    return numel


def _check_tensor(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], numel: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: expected a tensor on device cpu, got device {tensor.device}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.numel() != numel:
        raise ValueError(f"{name}: expected {numel} elements as in param, got {tensor.numel()}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    if tensor.is_neg():
        raise ValueError(f"{name}: expected a tensor of plain values, got a lazily negated view; call resolve_neg()")
    needed = (tensor.storage_offset() + numel) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if numel > 0 and held < needed:
        raise ValueError(f"{name}: expected {needed} bytes of storage, got {held}; has it been freed?")


def pointers(grad: torch.Tensor, out: torch.Tensor | None) -> tuple[int, str, int, str]:
    """Address and dtype of each, as the kernels take them."""
    if out is None:
        return grad.data_ptr(), DTYPE_NAMES[grad.dtype], 0, ""
    return grad.data_ptr(), DTYPE_NAMES[grad.dtype], out.data_ptr(), DTYPE_NAMES[out.dtype]


def note_written(*tensors: torch.Tensor | None) -> None:
    """So that autograd notices."""
    for written in tensors:
        if written is not None and not written.is_inference():
            torch.autograd.graph.increment_version(written)
