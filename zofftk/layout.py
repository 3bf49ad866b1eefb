"""Where every element of every parameter lives on the link and on the host: integers only, no memory.

Parameters are laid out one after the other, last first, because backward delivers them about in that order.
A bucket is a consecutive range of that line which holds one wire dtype; a parameter that does not fit into the
rest of a bucket is cut at a multiple of BLOCK_NUMEL elements from its start, so a block of the gradient statistics
never lies in two buckets and the norm does not depend on the bucket size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_NUMEL = 4096  # elements over which one sum of squares is taken, counted from the start of each parameter
ALIGN_NUMEL = 64  # a parameter starts at a multiple of this, so that wide loads and stores are aligned


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of one parameter."""

    index: int  # position in the engine's list of parameters
    numel: int
    wire: str  # name of the dtype on the link
    itemsize: int  # of that dtype, in bytes


@dataclass(frozen=True)
class Piece:
    """A range of one parameter in one bucket."""

    param: int
    start: int  # elements [start, stop) of the parameter ...
    stop: int
    offset: int  # ... lie from here on in the bucket
    block: int  # first of its blocks in the bucket's statistics

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def num_blocks(self) -> int:
        return -(-self.numel // BLOCK_NUMEL)


@dataclass(frozen=True)
class Bucket:
    """What travels in one copy."""

    wire: str
    itemsize: int
    start: int  # first element in the host arena
    numel: int  # padding included
    first_block: int  # in the host's statistics
    num_blocks: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    buckets: tuple[Bucket, ...]
    param_start: dict[int, int]  # first element of each parameter in the host arena; its pieces follow one another
    param_blocks: dict[int, tuple[int, int]]  # first block and number of blocks of each parameter
    numel: int  # of the host arena, padding included
    num_blocks: int

    def slot_size(self) -> tuple[int, int]:
        """Bytes and blocks that hold any one bucket; the bytes are whole elements of every dtype."""
        nbytes = _round_up(max(bucket.numel * bucket.itemsize for bucket in self.buckets), ALIGN_NUMEL)
        return nbytes, max(bucket.num_blocks for bucket in self.buckets)


def build_layout(specs: Sequence[ParamSpec], bucket_bytes: int) -> Layout:
    """Lay out `specs` in buckets of about `bucket_bytes`: whole blocks, and at least one."""
    line = _Line()
    for wire, itemsize in sorted({(spec.wire, spec.itemsize) for spec in specs}):
        line.wire, line.itemsize = wire, itemsize
        line.capacity = max(1, bucket_bytes // (itemsize * BLOCK_NUMEL)) * BLOCK_NUMEL
        for spec in reversed([spec for spec in specs if spec.wire == wire]):
            line.append(spec)
        line.close_bucket()
    return Layout(tuple(line.buckets), line.param_start, _param_blocks(line.buckets), line.arena_numel, line.next_block)


def default_bucket_bytes(specs: Sequence[ParamSpec]) -> int:
    """Several buckets also for a small model, so that copies overlap; large enough for the link's full speed."""
    total_bytes = sum(spec.numel * spec.itemsize for spec in specs)
    return min(max(total_bytes // 8, 256 * 1024), 16 * 1024 * 1024)


class _Line:
    """The line while it is being laid: closed buckets, and the one that is still open."""

    def __init__(self) -> None:
        self.wire, self.itemsize = "", 1
        self.capacity = BLOCK_NUMEL
        self.next_block = 0
        self.buckets: list[Bucket] = []
        self.param_start: dict[int, int] = {}
        self.arena_numel = 0
        self._open_empty_bucket()

    def _open_empty_bucket(self) -> None:
        self.pieces: list[Piece] = []
        self.offset = 0
        self.block = 0

    def append(self, spec: ParamSpec) -> None:
        self.offset = _round_up(self.offset, ALIGN_NUMEL)
        if spec.numel == 0:
            self._append_piece(spec, 0, 0)
        start = 0
        while start < spec.numel:
            room = self.capacity - self.offset
            stop = spec.numel if spec.numel - start <= room else start + room // BLOCK_NUMEL * BLOCK_NUMEL
            if stop > start:
                self._append_piece(spec, start, stop)
            start = stop
            if start < spec.numel:
                self.close_bucket()

    def _append_piece(self, spec: ParamSpec, start: int, stop: int) -> None:
        self.param_start.setdefault(spec.index, self.arena_numel + self.offset)
        piece = Piece(spec.index, start, stop, self.offset, self.block)
        self.pieces.append(piece)
        self.offset += piece.numel
        self.block += piece.num_blocks

    def close_bucket(self) -> None:
        if self.pieces:
            pieces = tuple(self.pieces)
            self.buckets.append(
                Bucket(self.wire, self.itemsize, self.arena_numel, self.offset, self.next_block, self.block, pieces)
            )
            self.next_block += self.block
            self.arena_numel = _round_up(self.arena_numel + self.offset, ALIGN_NUMEL)
        self._open_empty_bucket()


def _param_blocks(buckets: Sequence[Bucket]) -> dict[int, tuple[int, int]]:
    blocks: dict[int, tuple[int, int]] = {}
    for bucket in buckets:
        for piece in bucket.pieces:
            first, num = blocks.get(piece.param, (bucket.first_block + piece.block, 0))
            assert first + num == bucket.first_block + piece.block  # the pieces' blocks follow one another
            blocks[piece.param] = (first, num + piece.num_blocks)
    return blocks


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
