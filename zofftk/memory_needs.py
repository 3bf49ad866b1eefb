"""What an optimizer will need of the host and of its device, by arithmetic, and a warning where it is not there.

Counted are what the engine allocates and what training cannot do without; activations, which are the model's, are not.
So no warning says nothing about them: `zofftk plan` does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zofftk.config import OffloadConfig
from zofftk.host_memory import available_memory
from zofftk.layout import BLOCK_NUMEL, ParamSpec, default_bucket_bytes
from zofftk.ranks.slices import local_of
from zofftk.threads import ranks_on_host

logger = logging.getLogger("zofftk")

MIB, GIB = 1 << 20, 1 << 30
STATISTICS_BYTES = 8  # for each block of a gradient


@dataclass(frozen=True)
class Needs:
    """Bytes that are to be allocated still: of the host for all its ranks, of one device."""

    host_bytes: int
    device_bytes: int


def needs_of(
    params: Sequence[torch.Tensor], config: OffloadConfig, num_states: int, *, ranks: int = 1, ranks_here: int = 1
) -> Needs:
    """Of trainable parameters that have their place on the device already.

    Args:
        params: those that are trained.
        config: the engine's options.
        num_states: fp32 values of a parameter that the update keeps beside the master.
        ranks: that share the states.
        ranks_here: devices of one host.
    """
    specs = []
    largest_grad_bytes = 0
    for index, param in enumerate(params):
        here, wire = local_of(param), config.wire_dtype or param.dtype
        specs.append(ParamSpec(index, here.numel(), str(wire), wire.itemsize))
        largest_grad_bytes = max(largest_grad_bytes, here.numel() * here.dtype.itemsize)
    numel = sum(spec.numel for spec in specs)
    wires = sum(spec.numel * spec.itemsize for spec in specs)
    late = config.update == "delayed"
    accumulates = config.backwards_per_step is not None and config.backwards_per_step > 1
    host = numel * 4 * (1 + num_states + accumulates) + wires * (1 + late)
    host += STATISTICS_BYTES * sum(-(-spec.numel // BLOCK_NUMEL) for spec in specs)
    bucket = min(config.bucket_bytes or default_bucket_bytes(specs), wires)
    return Needs(host * ranks_here // ranks, config.staging_slots * bucket + largest_grad_bytes)


def warn_if_short(params: Sequence[torch.Tensor], config: OffloadConfig, num_states: int, *, ranks: int) -> None:
    """One line in the log where the host or the device has less left than will be needed; never an error."""
    real = [param for param in params if not isinstance(local_of(param), FakeTensor)]
    if not real or config.device is not None:
        return  # a dry run, or a machine of the caller's
    needs = needs_of(real, config, num_states, ranks=ranks, ranks_here=ranks_on_host())
    place = local_of(real[0]).device
    short = []
    if needs.host_bytes > (free := available_memory()):
        short.append(f"{_size(needs.host_bytes)} of host memory, of which {_size(free)} can be had")
    if place.type == "cuda":
        free = torch.cuda.mem_get_info(place)[0] + _cached_bytes(place)
        if needs.device_bytes > free:
            short.append(f"{_size(needs.device_bytes)} on {place}, of which {_size(free)} are free")
    if short:
        logger.warning(
            "this training is likely to run out of memory: the optimizer needs %s, activations not counted. What "
            "helps: more ranks on more hosts, which share the states; update='synchronous'; smaller bucket_bytes; "
            "a higher limit of the control group; a smaller model. `zofftk plan` says what fits",
            " and ".join(short),
        )


def _cached_bytes(place: torch.device) -> int:
    """What torch has taken of the device and nobody uses."""
    return torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:,.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:,.1f} MiB"
