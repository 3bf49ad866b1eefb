"""Adam and AdamW on CPU tensors, one pass over memory, by the compiled kernel.

The update that ZeRO-Offload runs on the host (section 5.1 of the paper), usable by any trainer. Loss scale, clip
coefficient, weight decay and the copy back to 16 bits are part of the pass. The same bits come out on every
instruction set, thread count and alignment.
"""

import operator
from typing import Any

import torch

from zofftk import _cpu_adam
from zofftk.threads import usable_threads

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def adamw_step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
    threads: int | None = None,
) -> None:
    """One AdamW step (decoupled weight decay, as ``torch.optim.AdamW``), in place.

    Args:
        param, exp_avg, exp_avg_sq: float32 parameter and moments, updated in place.
        grad: gradient, float32, bfloat16 or float16; read only.
        step: number of this step, counted from 1; sets the bias corrections.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        grad_scale: factor the gradient is multiplied with first: one over the loss scale, times any clip coefficient.
        out: receives the new parameter in its own dtype (float32, bfloat16 or float16), rounded to nearest, ties to
            even; may be ``grad`` itself. None: no copy is made.
        threads: upper bound of threads; default ``zofftk.threads.usable_threads()``.

    All tensors are contiguous, on the CPU, of equal numel (any shape, any offset into their storage, also empty), and
    those written overlap no other.

    Raises:
        TypeError: an argument is not a tensor or not a number, or has another dtype than listed.
        ValueError: device, layout, numel, overlap or a number is not as listed. Nothing has changed then.
    """
    _step(param, exp_avg, exp_avg_sq, grad, step, lr, betas, eps, weight_decay, grad_scale, out, threads, True)


def adam_step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
    threads: int | None = None,
) -> None:
    """One Adam step in place, its weight decay added to the gradient (L2, as ``torch.optim.Adam``).

    Arguments and errors are those of :func:`adamw_step`.
    """
    _step(param, exp_avg, exp_avg_sq, grad, step, lr, betas, eps, weight_decay, grad_scale, out, threads, False)


def check_hyperparameters(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """Raise ValueError (TypeError for what is no number) naming the first that Adam cannot use."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not as_number(name, value) >= 0.0:
            raise ValueError(f"{name}: expected 0 or more, got {value}")
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        if not 0.0 <= as_number(f"betas[{index}]", beta) < 1.0:
            raise ValueError(f"betas[{index}]: expected 0 <= beta < 1, got {beta}")


def check_threads(threads: Any) -> int:
    """The number of threads as an int; raises TypeError or ValueError where it cannot be one."""
    return _whole("threads", threads, 31)


def as_number(name: str, value: Any) -> float:
    """Of anything but text that float() takes; raises TypeError."""
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None


def _whole(name: str, value: Any, bits: int) -> int:
    try:
        whole = operator.index(value)
    except (TypeError, RuntimeError):
        raise TypeError(f"{name}: expected a whole number, got {value!r}") from None
    if whole < 1:
        raise ValueError(f"{name}: expected 1 or more, got {value}")
    if whole >= 2**bits:
        raise ValueError(f"{name}: expected less than 2**{bits}, got {value}")
    return whole


def _check_tensor(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int) -> None:
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


def _step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float,
    out: torch.Tensor | None,
    threads: int | None,
    decoupled: bool,
) -> None:
    check_hyperparameters(lr, betas, eps, weight_decay)
    step, threads = _whole("step", step, 63), usable_threads() if threads is None else check_threads(threads)
    grad_scale = as_number("grad_scale", grad_scale)
    numel = param.numel() if isinstance(param, torch.Tensor) else 0
    for name, tensor in (("param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check_tensor(name, tensor, (torch.float32,), numel)
    _check_tensor("grad", grad, tuple(DTYPE_NAMES), numel)
    if out is not None:
        _check_tensor("out", out, tuple(DTYPE_NAMES), numel)
    if numel == 0:
        return
    _cpu_adam.adam_step(
        param.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        DTYPE_NAMES[grad.dtype],
        0 if out is None else out.data_ptr(),
        "" if out is None else DTYPE_NAMES[out.dtype],
        numel,
        step=step,
        lr=float(lr),
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        eps=float(eps),
        weight_decay=float(weight_decay),
        decoupled=decoupled,
        grad_scale=grad_scale,
        threads=threads,
    )
    for written in (param, exp_avg, exp_avg_sq, out):
        if written is not None and not written.is_inference():
            torch.autograd.graph.increment_version(written)
