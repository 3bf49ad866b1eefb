"""The tasks of the host stream on one bucket: sum gradients, take their statistics, update the states in one pass.

Each function captures, when it is called, all that the schedule may change before the task runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from zofftk import cpu_kernels
from zofftk.device.base import Buffer
from zofftk.host_state import HostBucket
from zofftk.layout import ALIGN_NUMEL, Piece
from zofftk.rules.base import Elements, Hyper

Task = Callable[[], None]


@dataclass(frozen=True)
class UpdateRun:
    """Neighbours that take the same update, with the padding between them."""

    start: int
    stop: int
    hyper: Hyper
    step: int
    grad_scale: float


def apply(
    bucket: HostBucket,
    present: set[int],
    hypers: Mapping[int, Hyper],
    steps: Mapping[int, int],
    coefficient: float,
    threads: int,
) -> Task:
    """Update the states of the parameters in `present` and leave their new values on the wire."""
    source = bucket.total if bucket.summed else bucket.wire
    assert source is not None
    wire, zeros = bucket.wire, bucket.pieces_of(bucket.zero)
    runs = _update_runs(bucket, present, hypers, steps, coefficient)

    def task() -> None:
        for piece in zeros:
            _cut(source.tensor, piece).zero_()
        for run in runs:
            part = slice(run.start, run.stop)
            elements = Elements(
                bucket.master.tensor[part],
                {name: bucket.moments[name].tensor[part] for name in run.hyper.states},
                source.tensor[part],
                wire.tensor[part],
            )
            run.hyper.update(elements, step=run.step, grad_scale=run.grad_scale, threads=threads)

    return task


def _update_runs(
    bucket: HostBucket, present: set[int], hypers: Mapping[int, Hyper], steps: Mapping[int, int], coefficient: float
) -> list[UpdateRun]:
    runs: list[UpdateRun] = []
    for piece in bucket.shard.pieces:
        param = piece.param
        if param not in present or piece.numel == 0:
            continue
        scale = bucket.scale.get(param, 1.0) * bucket.average * coefficient
        run = UpdateRun(piece.offset, piece.offset + piece.numel, hypers[param], steps[param], scale)
        if runs and _same_update(runs[-1], run) and run.start - runs[-1].stop < ALIGN_NUMEL:
            run = UpdateRun(runs.pop().start, run.stop, run.hyper, run.step, run.grad_scale)
        runs.append(run)
    return runs


def _same_update(a: UpdateRun, b: UpdateRun) -> bool:
    return (a.hyper, a.step, a.grad_scale) == (b.hyper, b.step, b.grad_scale)


def add_to_total(bucket: HostBucket, threads: int) -> Task:
    """total += wire for what is on the wire; then total *= scale where another gradient waits to be added to it."""
    total, wire = bucket.total, bucket.wire
    assert total is not None
    first = bucket.pieces_of(bucket.on_wire - bucket.summed)
    again = bucket.pieces_of(bucket.on_wire & bucket.summed)
    scales = [
        (piece, scale)
        for param, scale in bucket.scale.items()
        if param in bucket.waiting
        for piece in bucket.pieces_of([param])
    ]

    def task() -> None:
        for piece in first:
            _cut(total.tensor, piece).copy_(_cut(wire.tensor, piece))
        for piece in again:
            cpu_kernels.accumulate(_cut(total.tensor, piece), _cut(wire.tensor, piece), threads)
        for piece, scale in scales:
            _cut(total.tensor, piece).mul_(scale)

    return task


def add_part(bucket: HostBucket, piece: Piece, part: Buffer, threads: int) -> Task:
    """total = part for the first gradient of a parameter, and total + part for another."""
    total, first = bucket.total, piece.param not in bucket.summed
    assert total is not None

    def task() -> None:
        if first:
            _cut(total.tensor, piece).copy_(part.tensor)
        else:
            cpu_kernels.accumulate(_cut(total.tensor, piece), part.tensor, threads)

    return task


def square_sums(bucket: HostBucket, gradients: Buffer, params: set[int], threads: int) -> Task:
    """The statistics of the gradients of `params`, which are in the bucket's wire or total."""
    pieces = bucket.pieces_of(params)

    def task() -> None:
        for piece in pieces:
            sums = bucket.square_sums.tensor[piece.block : piece.block + piece.num_blocks]
            cpu_kernels.block_square_sums(_cut(gradients.tensor, piece), sums, threads)

    return task


def _cut(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    return flat[piece.offset : piece.offset + piece.numel]
