"""The options of the engine: one frozen dataclass, validated here and nowhere else."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zofftk.loss_scale import LossScale

if TYPE_CHECKING:
    import torch.distributed as dist

    from zofftk.device.base import Device
    from zofftk.ranks.virtual_group import VirtualGroup

MAX_THREADS = 4096
UPDATES = ("synchronous", "delayed")
WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCE_DTYPES = (torch.float32,)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """How gradients travel and where the update runs. Every field is also a keyword of the optimizers.

    Attributes:
        max_grad_norm: clip the global L2 norm of the true gradients to this inside the engine; None: no clipping.
        bucket_bytes: size of one bucket on the link, in bytes; small tensors share a bucket, large ones span several.
            None: an eighth of what the parameters send, between 256 KiB and 16 MiB.
        staging_slots: bucket-sized buffers on the device, shared by both directions; 2 or more let copies overlap.
        wire_dtype: dtype on the link; None: each parameter's own (so fp32 parameters move 4 + 4 bytes).
        loss_scale: factor on the loss, for fp16: a `LossScale` that adapts, or a number; see `opt.scale_loss`. Norms
            and clipping see the true gradient.
        update: "synchronous", or "delayed": the host applies a gradient while the next step computes, and the
            parameters get their values one step late.
        delay_after: steps that are synchronous before the delay begins, counted from the first of a run, also where
            it was saved and resumed.
        backwards_per_step: announces how many backwards bring the gradients of a step. With 1, delayed values are
            exchanged behind the gradients inside backward, wherever that is right; a second backward after such an
            exchange and before the step is an error.
        process_group: the ranks that train this model on different data and share its states (a
            `torch.distributed` process group, or a `VirtualGroup` in a dry run); None: all ranks, where
            `torch.distributed` is initialised. Where
            parameters are DTensors (`parallelize_module`, on a mesh of one dimension): those with the same slices,
            which None finds where the mesh is all ranks, or one of the two dimensions of a mesh of all ranks.
            Those of `fully_shard` are taken too; with it, accumulate by `set_requires_gradient_sync(False)` in all
            micro-batches but the last.
        reduce_dtype: dtype in which gradients are summed over ranks; None: the wire's, which rounds each sum.
            `torch.float32` rounds once, on the device, before a rank's part goes down: staging slots and what goes
            between the ranks grow to 4 bytes an element, host and link stay as they are.
        rank_timeout_s: how long a rank waits for the others before it gives up, in seconds; None: torch's default.
        threads: threads of the update; None: as many as the process may use.
        pinned_bytes: the most page-locked host memory to take (CUDA), in bytes; None: what the link's buffers need.
        device: a `Device` to run on instead of the one that fits the parameters (tests, planning).
        trace: keep a span of every operation, for `write_trace`.
    """

    max_grad_norm: float | None = None
    bucket_bytes: int | None = None
    staging_slots: int = 3
    wire_dtype: torch.dtype | None = None
    loss_scale: LossScale | float | None = None
    update: str = "synchronous"
    delay_after: int = 40
    backwards_per_step: int | None = None
    process_group: dist.ProcessGroup | VirtualGroup | None = None
    reduce_dtype: torch.dtype | None = None
    rank_timeout_s: float | None = None
    threads: int | None = None
    pinned_bytes: int | None = None
    device: Device | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not (_is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ValueError(f"max_grad_norm must be a positive number or None, got {self.max_grad_norm!r}")
        if self.bucket_bytes is not None and (not _is_integer(self.bucket_bytes) or self.bucket_bytes < 1):
            raise ValueError(f"bucket_bytes must be a positive number of bytes, or None, got {self.bucket_bytes!r}")
        if not _is_integer(self.staging_slots) or self.staging_slots < 1:
            raise ValueError(f"staging_slots must be 1 or more, got {self.staging_slots!r}")
        if self.wire_dtype is not None and self.wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype must be one of {_names(WIRE_DTYPES)} or None, got {self.wire_dtype!r}")
        if self.reduce_dtype is not None and self.reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype must be {_names(REDUCE_DTYPES)} or None, got {self.reduce_dtype!r}")
        scale = self.loss_scale
        if not (scale is None or isinstance(scale, LossScale) or (_is_number(scale) and scale > 0)):
            raise ValueError(f"loss_scale must be a LossScale, a positive number or None, got {scale!r}")
        if self.update not in UPDATES:
            raise ValueError(f"update must be one of {', '.join(UPDATES)}, got {self.update!r}")
        if not _is_integer(self.delay_after) or self.delay_after < 0:
            raise ValueError(f"delay_after must be 0 or more steps, got {self.delay_after!r}")
        backwards = self.backwards_per_step
        if backwards is not None and (not _is_integer(backwards) or backwards < 1):
            raise ValueError(f"backwards_per_step must be 1 or more, or None, got {backwards!r}")
        timeout = self.rank_timeout_s
        if timeout is not None and not (_is_number(timeout) and timeout > 0):
            raise ValueError(f"rank_timeout_s must be a positive number of seconds, or None, got {timeout!r}")
        if self.threads is not None and (not _is_integer(self.threads) or not 1 <= self.threads <= MAX_THREADS):
            raise ValueError(f"threads must be from 1 to {MAX_THREADS}, or None, got {self.threads!r}")

        if self.pinned_bytes is not None and (not _is_integer(self.pinned_bytes) or self.pinned_bytes < 0):
            raise ValueError(f"pinned_bytes must be 0 or more bytes, or None, got {self.pinned_bytes!r}")

    @classmethod
    def merged(cls, config: OffloadConfig | None, options: dict[str, Any]) -> OffloadConfig:
        """`config` (or the defaults) with `options` laid over it; TypeError names an option that does not exist."""
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"config must be an OffloadConfig, got {type(config).__name__}")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}: expected one of {', '.join(sorted(known))}")
        return dataclasses.replace(config or cls(), **options)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
