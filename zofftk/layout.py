"""Where every element of every parameter lives on the link and on the host: integers only, no memory.

Parameters are laid out one after the other, last first, because backward delivers them about in that order.
A bucket is a consecutive range of that line which holds one wire dtype; a parameter that does not fit into the
rest of a bucket is cut at a multiple of BLOCK_NUMEL elements from its start, so a block of the gradient statistics
never lies in two buckets and the norm does not depend on the bucket size.

Over several ranks, a bucket is as many such ranges as there are ranks, its shards, padded to one length: each rank
keeps the states of its own shard, in an arena of its own.
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
class Shard:
    """What one rank keeps of a bucket."""

    start: int  # first element in the rank's host arena
    numel: int  # padding included; the same for all shards of a bucket
    first_block: int  # in the rank's statistics
    num_blocks: int
    pieces: tuple[Piece, ...]  # counted from the start of the shard


@dataclass(frozen=True)
class Bucket:
    """What travels in one copy, or in one collective."""

    wire: str
    itemsize: int
    shards: tuple[Shard, ...]  # by rank
    numel: int  # of all shards
    num_blocks: int
    pieces: tuple[Piece, ...]  # of all shards, counted from the start of the bucket

    @property
    def params(self) -> frozenset[int]:
        return frozenset(piece.param for piece in self.pieces)


@dataclass(frozen=True)
class Layout:
    buckets: tuple[Bucket, ...]
    param_blocks: dict[int, tuple[int, int]]  # first block and number of blocks of each parameter, over all ranks
    numel: int  # of a rank's host arena, padding included: the same on every rank
    num_blocks: int  # of all ranks
    rank_blocks: tuple[int, ...]  # blocks of each rank's statistics

    def slot_size(self, itemsize: int = 1) -> tuple[int, int]:
        """Bytes and blocks that hold any one bucket, in elements of `itemsize` bytes or more; whole ones always."""
        nbytes = _round_up(max(bucket.numel * max(bucket.itemsize, itemsize) for bucket in self.buckets), ALIGN_NUMEL)
        return nbytes, max(bucket.num_blocks for bucket in self.buckets)


def build_layout(specs: Sequence[ParamSpec], bucket_bytes: int, num_ranks: int = 1) -> Layout:
    """Lay out `specs` in buckets of about `bucket_bytes`: whole blocks, and at least one."""
    line = _Line(num_ranks)
    for wire, itemsize in sorted({(spec.wire, spec.itemsize) for spec in specs}):
        own = [spec for spec in specs if spec.wire == wire]
        line.wire, line.itemsize = wire, itemsize
        line.open(own, max(1, bucket_bytes // (itemsize * num_ranks * BLOCK_NUMEL)) * BLOCK_NUMEL)
        for spec in reversed(own):
            line.append(spec)
        line.close_bucket()
    return Layout(
        tuple(line.buckets),
        _param_blocks(line.buckets),
        line.arena_numel,
        sum(line.rank_blocks),
        tuple(line.rank_blocks),
    )


def default_bucket_bytes(specs: Sequence[ParamSpec]) -> int:
    """Several buckets also for a small model, so that copies overlap; large enough for the link's full speed."""
    total_bytes = sum(spec.numel * spec.itemsize for spec in specs)
    return min(max(total_bytes // 8, 256 * 1024), 16 * 1024 * 1024)


class _Line:
    """The line while it is being laid: closed buckets, and the one that is still open."""

    def __init__(self, num_ranks: int) -> None:
        self.wire, self.itemsize = "", 1
        self.largest = self.capacity = BLOCK_NUMEL  # of a shard: the most, and that of the open bucket
        self.to_come = 0  # elements that no closed bucket holds
        self.buckets: list[Bucket] = []
        self.arena_numel = 0
        self.rank_blocks = [0] * num_ranks
        self._filled: list[list[Piece]] = []  # the shards of the open bucket
        self._open_shard()

    def open(self, specs: Sequence[ParamSpec], largest: int) -> None:
        """Begin with what has a wire dtype, in shards of at most `largest` elements."""
        self.largest = largest
        self.to_come = sum(_round_up(spec.numel, ALIGN_NUMEL) for spec in specs)
        self._choose_capacity()

    def _choose_capacity(self) -> None:
        """Elements of a shard: whole blocks. Over several ranks, what is to come is spread over the shards it needs,
        so that all ranks hold about as much."""
        num_ranks = len(self.rank_blocks)
        self.capacity = self.largest
        if num_ranks > 1:
            num_buckets = max(1, -(-self.to_come // (self.largest * num_ranks)))
            even = _round_up(-(-self.to_come // (num_buckets * num_ranks)), BLOCK_NUMEL)
            # A shard ends with a whole block or a parameter, so it may hold up to one block less than it could.
            self.capacity = min(self.largest, even + (BLOCK_NUMEL if num_buckets == 1 else 0))

    def _open_shard(self) -> None:
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
                self._close_shard()

    def _append_piece(self, spec: ParamSpec, start: int, stop: int) -> None:
        piece = Piece(spec.index, start, stop, self.offset, self.block)
        self.pieces.append(piece)
        self.offset += piece.numel
        self.block += piece.num_blocks

    def _close_shard(self) -> None:
        self._filled.append(self.pieces)
        self._open_shard()
        if len(self._filled) == len(self.rank_blocks):
            self._close_filled()

    def close_bucket(self) -> None:
        """The end of the line, or of a wire dtype."""
        if self.pieces:
            self._close_shard()
        if self._filled:
            self._close_filled()

    def _close_filled(self) -> None:
        shards, pieces = self._filled, []
        numel = max((piece.offset + piece.numel for shard in shards for piece in shard), default=0)
        if len(self.rank_blocks) > 1:
            numel = _round_up(numel, ALIGN_NUMEL)
        made, block = [], 0
        for rank, shard in enumerate([*shards, *([] for _ in range(len(self.rank_blocks) - len(shards)))]):
            num_blocks = sum(piece.num_blocks for piece in shard)
            made.append(Shard(self.arena_numel, numel, self.rank_blocks[rank], num_blocks, tuple(shard)))
            pieces += [
                Piece(piece.param, piece.start, piece.stop, rank * numel + piece.offset, block + piece.block)
                for piece in shard
            ]
            self.rank_blocks[rank] += num_blocks
            block += num_blocks
        self.buckets.append(Bucket(self.wire, self.itemsize, tuple(made), numel * len(made), block, tuple(pieces)))
        self.arena_numel = _round_up(self.arena_numel + numel, ALIGN_NUMEL)
        self.to_come -= sum(_round_up(piece.numel, ALIGN_NUMEL) for piece in pieces)
        self._filled = []
        self._choose_capacity()


def _param_blocks(buckets: Sequence[Bucket]) -> dict[int, tuple[int, int]]:
    """Blocks are counted along the line: bucket by bucket, shard by shard."""
    blocks: dict[int, tuple[int, int]] = {}
    before = 0
    for bucket in buckets:
        for piece in bucket.pieces:
            first, num = blocks.get(piece.param, (before + piece.block, 0))
            assert first + num == before + piece.block  # the pieces' blocks follow one another
            blocks[piece.param] = (first, num + piece.num_blocks)
        before += bucket.num_blocks
    return blocks


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
