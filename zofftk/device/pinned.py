"""Page-locked host memory of exactly the size asked for: huge pages registered with CUDA, within a bound.

Allocators that keep page-locked memory round each request up to a power of two, which costs up to twice what was asked.
Registering memory of our own costs what was asked.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

logger = logging.getLogger("zofftk")

HUGE_PAGE_BYTES = 2 * 1024 * 1024


class Registrar(Protocol):
    """The two calls of CUDA's runtime, as CuPy names them."""

    def hostRegister(self, pointer: int, size: int, flags: int) -> Any: ...
    def hostUnregister(self, pointer: int) -> Any: ...


class PinnedMemory:
    """Allocates host buffers and page-locks them while `limit_bytes` and the system allow it.

    When they do not, the buffer is ordinary pageable memory with the same content and the copies are slower; one
    warning says so. `registered_bytes` is what is page-locked now, `refused_bytes` what should have been in all.
    """

    def __init__(self, registrar: Registrar, limit_bytes: int | None) -> None:
        self._registrar = registrar
        self._limit_bytes = limit_bytes
        # By address. A buffer may be freed on any thread, also while a sum is under way: each entry goes as a whole.
        self._registered: dict[int, int] = {}
        self.refused_bytes = 0

    @property
    def registered_bytes(self) -> int:
        return sum(list(self._registered.values()))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` zeroed bytes on whole pages."""
        memory = _pages(nbytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if nbytes and self._fits(nbytes) and self._register(tensor.data_ptr(), nbytes):
            # Unregistered before the pages go, which the storage keeps for as long as any view of it lives.
            storage, unregister = tensor.untyped_storage(), self._registrar.hostUnregister
            # At exit the driver lets go of it by itself, after the copies that are still under way.
            weakref.finalize(storage, _unregister, unregister, tensor.data_ptr(), self._registered).atexit = False
        return tensor[:nbytes]

    def _fits(self, nbytes: int) -> bool:
        if self._limit_bytes is not None and self.registered_bytes + nbytes > self._limit_bytes:
            self._refuse(nbytes, f"the option pinned_bytes allows {self._limit_bytes:,}")
            return False
        return True

    def _register(self, pointer: int, nbytes: int) -> bool:
        try:
            self._registrar.hostRegister(pointer, nbytes, 0)
        except Exception as error:  # CuPy's own error, or the driver's: no page-locked memory is never fatal
            self._refuse(nbytes, f"CUDA could not register it ({error}); see `ulimit -l` and the container's limits")
            return False
        self._registered[pointer] = nbytes
        return True

    def _refuse(self, nbytes: int, reason: str) -> None:
        if not self.refused_bytes:
            logger.warning(
                "page-locked host memory: %s of %s bytes stay pageable, so copies are slower: %s",
                f"{nbytes:,}",
                f"{self.registered_bytes + nbytes:,}",
                reason,
            )
        self.refused_bytes += nbytes


def _pages(nbytes: int) -> mmap.mmap:
    size = max(1, nbytes)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _unregister(unregister: Callable[[int], Any], pointer: int, registered: dict[int, int]) -> None:
    try:
        unregister(pointer)
    except Exception as error:  # at exit the driver may be gone already
        logger.debug("page-locked memory was not unregistered: %s", error)
    finally:
        registered.pop(pointer, None)  # the pages go now, so that later buffers may be page-locked in their place
