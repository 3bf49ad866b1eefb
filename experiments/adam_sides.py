"""Whoever makes one Adam step, on the same parameters: what each computes, what it must move, and what it allocates.

Bytes are those that its operations read and write, each tensor counted once for each operation: one pass for fused
kernels, one for each elementary operation for torch's loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zofftk import _cpu_adam
from zofftk.bench.cpu_adam import OPTIONS, huge_buffer
from zofftk.cpu_adam import adamw_step

OURS, PLAIN, FOREACH, FUSED, CASTS, DEEPSPEED = (
    "zofftk",
    "torch loop",
    "torch foreach",
    "torch fused",
    "torch fused + 2 casts",
    "DeepSpeedCPUAdam",
)
STREAM = "stream"  # the fastest loop that moves the same 28 bytes and computes nothing
BUFFER_BYTES = 18  # a parameter: fp32 parameter, gradient and moments, and a 16-bit gradient
# In torch's loops: decay 8, first moment 12, second 8 and 12, root 8, correction 8, eps 8, step 16.
BYTES = {OURS: 28, FUSED: 28, DEEPSPEED: 28, STREAM: 28, CASTS: 28 + 6 + 6, PLAIN: 80, FOREACH: 80}
# A parameter, allocated beside these: by foreach in passing, by DeepSpeed for moments of its own. The loop allocates
# for one tensor at a time.
OWN_BYTES = {FOREACH: 8, DEEPSPEED: 8}


@dataclass(frozen=True)
class Sides:
    """`steps` make one step each; `missing` says why others are not there; `reset` makes all contents new."""

    numel: int
    steps: dict[str, Callable[[], Any]]
    missing: dict[str, str]
    reset: Callable[[], None]


def open_sides(numel: int, tensor_numel: int, threads: int) -> Sides:
    """Steps on `numel` parameters in tensors of `tensor_numel`, or fewer in the last."""
    flat = [huge_buffer(numel, torch.float32) for _ in range(4)]
    half = huge_buffer(numel, torch.bfloat16)
    p, m, v, g32, g16 = ([*buffer.split(tensor_numel)] for buffer in (*flat, half))
    params = [torch.nn.Parameter(each) for each in p]
    for param, grad in zip(params, g32, strict=True):
        param.grad = grad

    def torch_step(**kind: Any) -> Callable[[], Any]:
        optimizer = torch.optim.AdamW(params, **OPTIONS, **kind)
        for param, first, second in zip(params, m, v, strict=True):
            optimizer.state[param] = dict(step=torch.tensor(10.0), exp_avg=first, exp_avg_sq=second)
        return optimizer.step

    def ours() -> None:
        for each in zip(p, m, v, g16, strict=True):
            adamw_step(*each, step=11, out=each[3], threads=threads, **OPTIONS)

    fused = torch_step(fused=True)

    def fused_and_casts() -> None:
        flat[3].copy_(half)
        fused()
        half.copy_(flat[0])

    def reset() -> None:
        for buffer, value in zip([*flat, half], (0.5, 1e-3, 1e-5, 1e-2, 1e-2), strict=True):
            buffer.fill_(value)

    reset()
    steps: dict[str, Callable[[], Any]] = {
        OURS: ours,
        PLAIN: torch_step(foreach=False),
        FOREACH: torch_step(foreach=True),
        FUSED: fused,
        CASTS: fused_and_casts,
    }
    first, second, third, gradient = (buffer.data_ptr() for buffer in (*flat[:3], half))
    streamed = first, second, third, gradient, gradient, numel, threads
    for kind in _cpu_adam.roof_kinds():
        steps[f"{STREAM} {kind}"] = lambda kind=kind: _cpu_adam.roof(kind, *streamed)
    missing: dict[str, str] = {}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

        steps[DEEPSPEED] = DeepSpeedCPUAdam(params, adamw_mode=True, **OPTIONS).step
    except Exception as error:  # it builds a kernel here and now, which may fail in any way
        missing[DEEPSPEED] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Sides(numel, steps, missing, reset)
