"""The compiled kernels on tensors, without the checks of the public front: the engine's own buffers fit by design."""

from __future__ import annotations

import numpy as np
import torch

from zofftk import _cpu_adam
from zofftk.layout import BLOCK_NUMEL

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


# Ends the threads of the kernels' pool once no call uses them; the next call makes new ones.
release_workers = _cpu_adam.release_workers


def adam(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: float,
    threads: int,
) -> None:
    """One pass: read `grad`, update the fp32 states in place, write the parameter to `out` (may be `grad`)."""
    _cpu_adam.adam_step(
        master.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        _NAMES[grad.dtype],
        0 if out is master else out.data_ptr(),
        _NAMES[out.dtype],
        master.numel(),
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        grad_scale=grad_scale,
        threads=threads,
    )


def lion(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float,
    threads: int,
) -> None:
    """One pass of Lion, as `adam`."""
    _cpu_adam.lion_step(
        master.data_ptr(),
        exp_avg.data_ptr(),
        grad.data_ptr(),
        _NAMES[grad.dtype],
        0 if out is master else out.data_ptr(),
        _NAMES[out.dtype],
        master.numel(),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        grad_scale=grad_scale,
        threads=threads,
    )


def sgd(
    master: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    grad: torch.Tensor,
    out: torch.Tensor,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    grad_scale: float,
    threads: int,
) -> None:
    """One pass of SGD, as `adam`; a `momentum_buffer` where `momentum` is not 0, whose values count but for `first`."""
    _cpu_adam.sgd_step(
        master.data_ptr(),
        0 if momentum_buffer is None else momentum_buffer.data_ptr(),
        grad.data_ptr(),
        _NAMES[grad.dtype],
        0 if out is master else out.data_ptr(),
        _NAMES[out.dtype],
        master.numel(),
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        first=first,
        grad_scale=grad_scale,
        threads=threads,
    )


def block_square_sums(flat: torch.Tensor, out: torch.Tensor, threads: int) -> None:
    """fp64 sums of squares of `flat` over blocks of BLOCK_NUMEL elements into the first elements of `out`."""
    _cpu_adam.block_square_sums(flat.data_ptr(), _NAMES[flat.dtype], flat.numel(), BLOCK_NUMEL, out.data_ptr(), threads)


def pack_ranges(table: np.ndarray, source: torch.dtype, target: torch.dtype) -> None:
    """Each row of `table` (int64: source, target, numel, sums): copy, cast, and the sums of squares of the blocks."""
    _cpu_adam.pack_ranges(table.ctypes.data, len(table), _NAMES[target], _NAMES[source], BLOCK_NUMEL)


def convert_ranges(table: np.ndarray, source: torch.dtype, target: torch.dtype) -> None:
    """Each row of `table` (int64: source, target, numel, unused): copy and cast."""
    _cpu_adam.convert_ranges(table.ctypes.data, len(table), _NAMES[target], _NAMES[source])


def converts(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether `pack_ranges` and `convert_ranges` know the pair."""
    return a in _NAMES and b in _NAMES and (a == b or torch.float32 in (a, b))


def accumulate(total: torch.Tensor, grad: torch.Tensor, threads: int) -> None:
    """`total += grad`, in fp32."""
    _cpu_adam.accumulate(total.data_ptr(), grad.data_ptr(), _NAMES[grad.dtype], grad.numel(), threads)
