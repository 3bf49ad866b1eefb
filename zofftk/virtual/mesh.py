"""A mesh of devices that are not there, for models that tensor parallelism cuts: torch's backend that only pretends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def virtual_mesh(size: int) -> Iterator[DeviceMesh]:
    """The mesh of the first of `size` ranks; torch.distributed is its own meanwhile.

    Raises:
        RuntimeError: torch.distributed is in use.
    """
    if dist.is_initialized():
        raise RuntimeError("a virtual mesh needs torch.distributed to itself, expected it not to be initialised")
    # Registers the backend that is called "fake"; torch offers it from here alone.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()
