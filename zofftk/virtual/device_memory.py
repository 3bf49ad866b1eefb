"""What lives on the device during a dry run: a line of allocations and frees, and the highest point of their sum.

The order is that in which the program asks for memory, which is what decides with CUDA's caching allocator too: it
gives a block out again as soon as the program has let go of it, to later work on the same stream.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

ROUND_BYTES = 512  # CUDA's caching allocator gives out multiples of it


def rounded(nbytes: int) -> int:
    return -(-nbytes // ROUND_BYTES) * ROUND_BYTES


@dataclass(frozen=True)
class Peak:
    """The highest point: what was alive there, in bytes."""

    nbytes: int
    gradients_bytes: int  # that a parameter was waiting for, or had
    activations_bytes: int  # all else


@dataclass
class DeviceMemory:
    """The line, as changes in bytes (`deltas`) of blocks (`blocks`); a block becomes a gradient's by `mark_gradient`.

    Blocks are numbered in the order they were asked for.
    """

    deltas: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    gradients: set[int] = field(default_factory=set)
    num_blocks: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)  # of the blocks that are alive

    def allocate(self, nbytes: int) -> int:
        """The number of the new block."""
        block, self.num_blocks = self.num_blocks, self.num_blocks + 1
        self._sizes[block] = rounded(nbytes)
        self._note(block, self._sizes[block])
        return block

    def free(self, block: int) -> None:
        self._note(block, -self._sizes.pop(block))

    def _note(self, block: int, delta: int) -> None:
        self.deltas.append(delta)
        self.blocks.append(block)

    def mark_gradient(self, block: int) -> None:
        self.gradients.add(block)

    @property
    def live_bytes(self) -> int:
        return sum(self._sizes.values())

    def peak(self) -> Peak:
        """Of the line so far; the first of several that are as high."""
        live = of_gradients = 0
        best = Peak(0, 0, 0)
        for delta, block in zip(self.deltas, self.blocks, strict=True):
            live += delta
            if block in self.gradients:
                of_gradients += delta
            if live > best.nbytes:
                best = Peak(live, of_gradients, live - of_gradients)
        return best


class Storages:
    """Turns the birth and death of tensors' storages into a line."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self._blocks: dict[int, int | None] = {}  # by the storage's address; None: not on the line
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Its storage is counted elsewhere."""
        self._watch(tensor.untyped_storage(), None)

    def add(self, tensor: torch.Tensor) -> bool:
        """Put the storage of a tensor on the line; False if it is known."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._blocks:
            return False
        self._watch(storage, self.memory.allocate(storage.nbytes()))
        return True

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """None for a storage that is not on the line."""
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def _watch(self, storage: torch.UntypedStorage, block: int | None) -> None:
        address = storage._cdata

        def gone(_: object) -> None:
            del self._references[address]
            if (freed := self._blocks.pop(address)) is not None:
                self.memory.free(freed)

        self._blocks[address] = block
        self._references[address] = weakref.ref(storage, gone)
