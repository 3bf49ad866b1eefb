"""The fp32 totals on the host, which gradients go into when a parameter gets more than one before its update."""

from __future__ import annotations

import torch

from zofftk import update
from zofftk.device.base import DOWN, HOST, Buffer, Device, Placement
from zofftk.host_state import HostBucket
from zofftk.layout import Piece
from zofftk.managed import Managed


class Totals:
    """See the module. A bucket's total exists from the first time it is needed."""

    def __init__(self, device: Device, wire_dtype: torch.dtype | None, threads: int) -> None:
        self._device = device
        self._wire_dtype = wire_dtype
        self._threads = threads

    def takes(self, managed: Managed, grad: torch.Tensor) -> bool:
        """Whether it is a gradient that the wire would round, though nobody has asked for that."""
        return not self._wire_dtype and torch.promote_types(grad.dtype, managed.wire) != managed.wire

    def add_wide(self, managed: Managed, grad: torch.Tensor) -> None:
        """Bring a gradient into the totals past the buckets."""
        for bucket in managed.buckets:
            piece = bucket.pieces[managed.index]
            if managed.index in bucket.on_wire or managed.index in bucket.scale:
                bucket.waiting[managed.index] = grad
                self.add(bucket)
                del bucket.waiting[managed.index]
            part = self._device.buffer(f"gradient of {managed.name}", piece.numel, torch.float32, "host")
            placement = Placement([Piece(piece.param, piece.start, piece.stop, 0, 0)])
            self._device.load(f"load: gradient of {managed.name}", placement, [grad], part)
            total = self._total(bucket)
            task = update.add_part(bucket, piece, part, self._threads)
            self._device.host_task(f"sum: gradient of {managed.name}", task, reads=[part], writes=[total])
            bucket.summed.add(managed.index)
            bucket.zero.discard(managed.index)

    def add(self, bucket: HostBucket) -> None:
        """Free the wire for another gradient, or make the total complete."""
        total, wire = self._total(bucket), [bucket.wire] if bucket.on_wire else []
        task = update.add_to_total(bucket, self._threads)
        if bucket.on_wire and bucket.arrived is not None:
            self._device.wait(HOST, bucket.arrived, f"arrived in wire: {bucket.label} must be here before it is summed")
        self._device.host_task(f"sum: {bucket.label}", task, reads=wire, writes=[total])
        bucket.summed |= bucket.on_wire
        bucket.on_wire = set()
        bucket.scale = {i: scale for i, scale in bucket.scale.items() if i not in bucket.waiting}
        summed = self._device.record(HOST)
        self._device.wait(DOWN, summed, f"summed: {bucket.label} must have been read before it is overwritten")

    def take_statistics(self, bucket: HostBucket) -> None:
        """Those of the total, in place of those that came with the last gradient."""
        if bucket.on_wire:
            self.add(bucket)
        assert bucket.total is not None
        if bucket.arrived is not None:  # those of a gradient that was dropped since may still be on their way
            self._device.wait(HOST, bucket.arrived, f"arrived in wire: statistics of {bucket.label} are overwritten")
        task = update.square_sums(bucket, bucket.total, bucket.summed, self._threads)
        self._device.host_task(f"statistics: {bucket.label}", task, reads=[bucket.total], writes=[bucket.square_sums])

    def _total(self, bucket: HostBucket) -> Buffer:
        if bucket.total is None:
            numel = bucket.shard.numel
            bucket.total = self._device.buffer(f"total of {bucket.label}", numel, torch.float32, "host", zero=True)
        return bucket.total
