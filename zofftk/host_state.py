"""The host's side of the buckets: fp32 master and moments, the wire's end, gradient statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch

from zofftk.device.base import Buffer, Device, Event, Placement, Run
from zofftk.layout import ALIGN_NUMEL, Bucket, Layout, Piece, Shard

_DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}


@dataclass(eq=False)
class HostBucket:
    """One bucket with its memory on the host, and what of it has been gathered for the coming update.

    `wire` is where gradients arrive and new values leave. When a second gradient comes before the update, the first
    is added to `total`, in fp32, which exists only from then on. Over several ranks, this memory is that of one shard,
    and what has been gathered is said of the whole bucket.
    """

    label: str
    bucket: Bucket
    shard: Shard
    master: Buffer
    wire: Buffer
    square_sums: Buffer
    moments: dict[str, Buffer] = field(default_factory=dict)  # by the optimizer's own names
    average: float = 1.0  # what is on the wire is still to be multiplied with
    total: Buffer | None = None
    arrived: Event | None = None  # the last gradient is on the host
    counted: Event | None = None  # its statistics have been taken there
    spare: Buffer | None = None  # a second wire, where values wait while gradients arrive in the first
    # By wire: its last values have left, and no gradient has come since.
    sent: dict[Buffer, Event] = field(default_factory=dict)
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)  # gradients that have not been packed yet
    on_wire: set[int] = field(default_factory=set)  # parameters whose gradient is in `wire` ...
    summed: set[int] = field(default_factory=set)  # ... or in `total`
    zero: set[int] = field(default_factory=set)  # parameters whose gradient is a true zero
    scale: dict[int, float] = field(default_factory=dict)  # factor on what was gathered, where it is not 1
    _whole_runs: tuple[list[Run], list[Run]] | None = None

    def __post_init__(self) -> None:
        self.params = self.bucket.params
        self.pieces = {piece.param: piece for piece in self.shard.pieces}  # what the shard has of each parameter
        self.whole = Placement(self.bucket.pieces)
        self.own = self.whole if self.shard.pieces == self.bucket.pieces else Placement(self.shard.pieces)
        self._whole_runs = self.runs(self.params), self.block_runs(self.params)

    def pieces_of(self, params: Iterable[int]) -> list[Piece]:
        """What the shard has of these."""
        return [self.pieces[param] for param in params if param in self.pieces]

    def swap_wires(self) -> None:
        assert self.spare is not None
        self.wire, self.spare = self.spare, self.wire

    def forget(self, params: set[int]) -> None:
        """Nothing has been gathered of `params` any more."""
        for place in (self.on_wire, self.summed, self.zero):
            place -= params
        for param in params:
            self.scale.pop(param, None)

    def gradient_source(self, param: int) -> Buffer:
        """Where the gradient of a parameter has been gathered."""
        return self.total if param in self.summed and self.total is not None else self.wire

    def read_gradient(self, param: int, flat: torch.Tensor) -> None:
        """Write this bucket's piece of a parameter's gradient, with its factor, into the parameter's fp32 row."""
        for piece in [] if param in self.zero else self.pieces_of([param]):
            values = self.gradient_source(param).tensor[piece.offset : piece.offset + piece.numel]
            flat[piece.start : piece.stop] = values.float() * (self.scale.get(param, 1.0) * self.average)

    def placement(self, params: Set[int]) -> Placement:
        """Where the pieces of `params` lie in the bucket, in its order."""
        if len(params) == len(self.params):
            return self.whole
        return Placement([piece for piece in self.bucket.pieces if piece.param in params])

    def runs(self, params: Set[int]) -> list[Run]:
        """The ranges of the shard that `params` cover; the padding between two of them is covered too."""
        if self._whole_runs and len(params) == len(self.params):
            return self._whole_runs[0]
        runs: list[Run] = []
        for piece in self.shard.pieces:
            if piece.param not in params or piece.numel == 0:
                continue
            if runs and piece.offset - (runs[-1].offset + runs[-1].numel) < ALIGN_NUMEL:
                runs[-1] = Run(runs[-1].offset, piece.offset + piece.numel - runs[-1].offset)
            else:
                runs.append(Run(piece.offset, piece.numel))
        return runs

    def block_runs(self, params: Set[int]) -> list[Run]:
        """The same for the statistics."""
        if self._whole_runs and len(params) == len(self.params):
            return self._whole_runs[1]
        runs: list[Run] = []
        for piece in self.shard.pieces:
            if piece.param not in params or piece.num_blocks == 0:
                continue
            if runs and piece.block == runs[-1].offset + runs[-1].numel:
                runs[-1] = Run(runs[-1].offset, runs[-1].numel + piece.num_blocks)
            else:
                runs.append(Run(piece.block, piece.num_blocks))
        return runs


@dataclass(eq=False)
class HostSegment:
    """The memory of the parameters that were added together: one arena for each state, cut into buckets."""

    layout: Layout
    rank: int
    buckets: list[HostBucket]
    arenas: dict[str, torch.Tensor]  # master and moments
    square_sums: torch.Tensor
    nbytes: int

    def __post_init__(self) -> None:
        self._parts = _merged_parts(self.buckets)
        self.num_ranks = len(self.layout.rank_blocks)

    @property
    def host_bytes(self) -> int:
        """With the fp32 totals, where there are any."""
        return self.nbytes + sum(bucket.total.nbytes for bucket in self.buckets if bucket.total is not None)

    def buckets_of_params(self) -> dict[int, list[HostBucket]]:
        """By parameter, in the order of the line."""
        found: dict[int, list[HostBucket]] = {}
        for bucket in self.buckets:
            for param in bucket.params:
                found.setdefault(param, []).append(bucket)
        return found

    def have(self, device: Device, states: Iterable[str]) -> None:
        """Make room for moments that are not there yet: zeros."""
        for state in states:
            if state not in self.arenas:
                arena = device.buffer(state, self.layout.numel, torch.float32, "host", zero=True)
                self.arenas[state] = arena.tensor
                self.nbytes += arena.nbytes
                for host in self.buckets:
                    shard = host.shard
                    host.moments[state] = device.slice(arena, f"{state} of {host.label}", shard.start, shard.numel)

    def have_spares(self, device: Device) -> None:
        """Give every bucket a second wire."""
        if self.buckets[0].spare is None:
            places = _allocate_wires(device, self.layout, self.rank)
            for bucket, place in zip(self.buckets, places, strict=True):
                bucket.spare = device.slice(place.arena, f"spare of {bucket.label}", place.offset, bucket.shard.numel)
            self.nbytes += sum({id(place.arena): place.arena.nbytes for place in places}.values())

    def parts(self, state: str, param: int) -> list[tuple[int, torch.Tensor]]:
        """What this rank has of one state of one parameter: flat ranges, each with its first element in the parameter.

        The storage of a part is as large as the part, not the arena: torch saves whole storages.
        """
        parts = []
        for part in self._parts.get(param, ()):
            flat = self.arenas[state][part.place : part.place + part.numel]
            parts.append((part.start, torch.from_numpy(flat.numpy()) if _has_data(flat) else flat))
        return parts


def _has_data(tensor: torch.Tensor) -> bool:
    """In a dry run the host's memory is on the meta device, or fake."""
    return type(tensor) is torch.Tensor and not tensor.is_meta


@dataclass
class _Part:
    """A range of a parameter in the arenas."""

    start: int  # in the parameter
    numel: int
    place: int  # in the arena


def _merged_parts(buckets: Sequence[HostBucket]) -> dict[int, list[_Part]]:
    parts: dict[int, list[_Part]] = {}
    for bucket in buckets:
        for piece in bucket.shard.pieces:
            place, ranges = bucket.shard.start + piece.offset, parts.setdefault(piece.param, [])
            last = ranges[-1] if ranges else None
            if last and (last.start + last.numel, last.place + last.numel) == (piece.start, place):
                last.numel += piece.numel
            else:
                ranges.append(_Part(piece.start, piece.numel, place))
    return parts


def allocate_segment(
    device: Device, layout: Layout, first_label: int, states: Iterable[str], rank: int = 0
) -> HostSegment:
    def zeros(name: str, numel: int, dtype: torch.dtype, on_link: bool = False) -> Buffer:
        return device.buffer(name, numel, dtype, "host", zero=True, on_link=on_link)

    master = zeros("master", layout.numel, torch.float32)
    square_sums = zeros("square_sums", layout.rank_blocks[rank], torch.float64, on_link=True)
    wires = _allocate_wires(device, layout, rank)
    buckets = []
    for number, (bucket, wire) in enumerate(zip(layout.buckets, wires, strict=True), first_label):
        shard = bucket.shards[rank]
        buckets.append(
            HostBucket(
                label=f"bucket {number}",
                bucket=bucket,
                shard=shard,
                master=device.slice(master, f"master {number}", shard.start, shard.numel),
                wire=device.slice(wire.arena, f"wire {number}", wire.offset, shard.numel),
                square_sums=device.slice(square_sums, f"statistics {number}", shard.first_block, shard.num_blocks),
            )
        )
    arenas = {id(wire.arena): wire.arena.nbytes for wire in wires}
    nbytes = master.nbytes + square_sums.nbytes + sum(arenas.values())
    segment = HostSegment(layout, rank, buckets, {"master": master.tensor}, square_sums.tensor, nbytes)
    segment.have(device, states)
    return segment


@dataclass(frozen=True)
class _WirePlace:
    arena: Buffer
    offset: int


def _allocate_wires(device: Device, layout: Layout, rank: int) -> list[_WirePlace]:
    """One arena per wire dtype, and where in it each bucket's wire begins, in the order of the buckets."""
    numel: dict[str, int] = {}
    for bucket in layout.buckets:
        numel[bucket.wire] = numel.get(bucket.wire, 0) + bucket.shards[rank].numel
    arenas = {wire: device.buffer(f"wire {wire}", n, _DTYPES[wire], "host", on_link=True) for wire, n in numel.items()}
    offsets = dict.fromkeys(numel, 0)
    places = []
    for bucket in layout.buckets:
        places.append(_WirePlace(arenas[bucket.wire], offsets[bucket.wire]))
        offsets[bucket.wire] += bucket.shards[rank].numel
    return places
