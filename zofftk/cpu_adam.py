"""Adam and AdamW on CPU tensors, one pass over memory, by the compiled kernel.

The update that ZeRO-Offload runs on the host (section 5.1 of the paper), usable by any trainer. Loss scale, clip
coefficient, weight decay and the copy back to 16 bits are part of the pass. The same bits come out on every
instruction set, thread count and alignment.
"""

from typing import Any

import torch

from zofftk import _cpu_adam
from zofftk.cpu_arguments import (
    as_number,
    check_at_least_0,
    check_betas,
    check_tensors,
    check_threads,
    note_written,
    pointers,
    whole,
)
from zofftk.threads import usable_threads


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
    check_at_least_0(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)


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
    step, threads = whole("step", step, 63), usable_threads() if threads is None else check_threads(threads)
    grad_scale = as_number("grad_scale", grad_scale)
    numel = check_tensors({"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, grad, out)
    if numel == 0:
        return
    _cpu_adam.adam_step(
        param.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        *pointers(grad, out),
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
    note_written(param, exp_avg, exp_avg_sq, out)
