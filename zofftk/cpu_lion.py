"""Lion on CPU tensors, one pass over memory, by the compiled kernel: as `zofftk.cpu_adam`, usable by any trainer."""

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
)
from zofftk.threads import usable_threads


def lion_step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    grad: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
    threads: int | None = None,
) -> None:
    """One Lion step, in place: ``param = param * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)``.

    Then ``m = beta2 * m + (1 - beta2) * g``. The sign of 0 is 0, that of NaN is NaN.

    Args:
        param, exp_avg: float32 parameter and moment ``m``, updated in place; the moment starts as zeros.
        grad: gradient, float32, bfloat16 or float16; read only.
        lr, betas, weight_decay: as in ``zofftk.OffloadLion``; lr and weight_decay 0 or more, each beta in [0, 1).
        grad_scale: factor the gradient is multiplied with first: one over the loss scale, times any clip coefficient.
        out: receives the new parameter in its own dtype (float32, bfloat16 or float16), rounded to nearest, ties to
            even; may be ``grad`` itself. None: no copy is made.
        threads: upper bound of threads; default ``zofftk.threads.usable_threads()``.

    All tensors are contiguous, on the CPU, of equal numel (any shape, any offset into their storage, also empty), and
    those written overlap no other. The bits are those of whole-tensor operations in float32, on every instruction set
    and thread count.

    Raises:
        TypeError: an argument is not a tensor or not a number, or has another dtype than listed.
        ValueError: device, layout, numel, overlap or a number is not as listed. Nothing has changed then.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2.
    """
    check_at_least_0(lr=lr, weight_decay=weight_decay)
    check_betas(betas)
    threads = usable_threads() if threads is None else check_threads(threads)
    grad_scale = as_number("grad_scale", grad_scale)
    numel = check_tensors({"param": param, "exp_avg": exp_avg}, grad, out)
    if numel == 0:
        return
    _cpu_adam.lion_step(
        param.data_ptr(),
        exp_avg.data_ptr(),
        *pointers(grad, out),
        numel,
        lr=float(lr),
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        weight_decay=float(weight_decay),
        grad_scale=grad_scale,
        threads=threads,
    )
    note_written(param, exp_avg, out)
