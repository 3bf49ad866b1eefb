"""One norm for everything: block sums added in order of the elements, then in order of the parameters, in fp64.

So the norm, and with it the clip coefficient, is the same for every bucket size, thread count and order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from zofftk import _cpu_adam
from zofftk.device.base import Buffer
from zofftk.host_state import HostSegment


def sum_blocks(segments: Sequence[HostSegment], out: Buffer) -> Callable[[], None]:
    """A host task: the square sum of every parameter, from the statistics of its blocks, into `out`."""

    def task() -> None:
        for segment in segments:
            add_blocks(segment, segment.square_sums.numpy(), out.tensor.numpy())

    return task


def add_blocks(segment: HostSegment, blocks: np.ndarray, sums: np.ndarray) -> None:
    """The square sums of the segment's parameters, by index, from fp64 `blocks` in the order of the line."""
    params = sorted(segment.layout.param_blocks)
    if segment.layout.num_blocks == 0:
        sums[params] = 0.0
        return
    places = [segment.layout.param_blocks[param] for param in params]
    starts = np.array([first for first, _ in places], np.int64)
    counts = np.array([num for _, num in places], np.int64)
    result = np.empty(len(params), np.float64)
    _cpu_adam.sum_runs(blocks.ctypes.data, starts.ctypes.data, counts.ctypes.data, len(params), result.ctypes.data)
    sums[params] = result


def global_norm(square_sums: Sequence[float]) -> float:
    """L2 norm of all gradients from the square sum of each, in the order of the parameters."""
    return math.sqrt(sum(square_sums))


def coefficient(norm: float, max_norm: float | None) -> float:
    """What to multiply the gradients with: `torch.nn.utils.clip_grad_norm_`'s rule."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
