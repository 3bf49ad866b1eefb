"""SGD on CPU tensors, one pass over memory, by the compiled kernel: as `zofftk.cpu_adam`, usable by any trainer."""

import torch

from zofftk import _cpu_adam
from zofftk.cpu_arguments import as_number, check_at_least_0, check_tensors, check_threads, note_written, pointers
from zofftk.threads import usable_threads


def sgd_step(
    param: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    grad: torch.Tensor,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
    threads: int | None = None,
) -> None:
    """One SGD step, in place, as ``torch.optim.SGD``.

    Args:
        param: float32 parameter, updated in place.
        momentum_buffer: float32, updated in place, where momentum is not 0; None where it is.
        grad: gradient, float32, bfloat16 or float16; read only.
        lr, momentum, dampening, weight_decay, nesterov: as in ``torch.optim.SGD``; lr, momentum and weight_decay 0 or
            more, and nesterov needs momentum and no dampening.
        first: the buffer holds nothing yet and becomes the gradient, undamped.
        grad_scale: factor the gradient is multiplied with first: one over the loss scale, times any clip coefficient.
        out: receives the new parameter in its own dtype (float32, bfloat16 or float16), rounded to nearest, ties to
            even; may be ``grad`` itself. None: no copy is made.
        threads: upper bound of threads; default ``zofftk.threads.usable_threads()``.

    All tensors are contiguous, on the CPU, of equal numel (any shape, any offset into their storage, also empty), and
    those written overlap no other. The same bits come out on every instruction set and thread count.

    Raises:
        TypeError: an argument is not a tensor or not a number, or has another dtype than listed.
        ValueError: device, layout, numel, overlap or a number is not as listed. Nothing has changed then.

    Source: ``torch.optim.SGD``.
    """
    check_at_least_0(lr=lr, momentum=momentum, weight_decay=weight_decay)
    dampening, momentum = as_number("dampening", dampening), float(momentum)
    if nesterov and (momentum == 0.0 or dampening != 0.0):
        raise ValueError(
            f"nesterov: expected momentum above 0 and dampening 0 with it, got momentum {momentum}, "
            f"dampening {dampening}"
        )
    if momentum == 0.0 and momentum_buffer is not None:
        raise ValueError("momentum_buffer: expected None where momentum is 0, got a buffer")
    threads = usable_threads() if threads is None else check_threads(threads)
    grad_scale = as_number("grad_scale", grad_scale)
    states = {"param": param} if momentum == 0.0 else {"param": param, "momentum_buffer": momentum_buffer}
    numel = check_tensors(states, grad, out)
    if numel == 0:
        return
    _cpu_adam.sgd_step(
        param.data_ptr(),
        0 if momentum_buffer is None else momentum_buffer.data_ptr(),
        *pointers(grad, out),
        numel,
        lr=float(lr),
        momentum=momentum,
        dampening=dampening,
        weight_decay=float(weight_decay),
        nesterov=bool(nesterov),
        first=bool(first),
        grad_scale=grad_scale,
        threads=threads,
    )
    note_written(param, momentum_buffer, out)
