"""Tensor parallelism as torch has it: parameters that are DTensors, each rank with its slice of them.

A rank offloads its slices as it would whole parameters. Two things concern the others: a gradient is brought to its
parameter's placement before it is taken (sequence parallelism delivers partial sums), and the norm of all gradients is
that of the whole parameters, in which replicated ones count once.

Source: ZeRO-Offload, section 4.2; torch.distributed.tensor.parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from zofftk.device.base import COMM, DOWN, HOST, UP, Buffer, Device, Run
from zofftk.managed import Managed
from zofftk.ranks.collectives import all_gather
from zofftk.ranks.group import RankGroup
from zofftk.ranks.slices import is_cut, placed
from zofftk.ranks.virtual_group import VirtualGroup


class TensorParallel:
    """The ranks that hold the slices of the same parameters."""

    def __init__(self, device: Device, group: RankGroup | VirtualGroup) -> None:
        self._device = device
        self.group = group
        self._num_params = -1

    def join(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> bool:
        """What is not cut is the same on every rank from now on; says whether this is the rank that presents it.

        Raises RankError where the ranks differ in their parameters.
        """
        described = [
            (name, tuple(tensor.shape), str(tensor.dtype), str(placement[1]) if (placement := placed(tensor)) else "")
            for name, tensor in zip(names, tensors, strict=True)
        ]
        self.group.check_same(described, "joining of slices")
        self.group.take_firsts([tensor for tensor in tensors if not is_cut(tensor)], "joining of slices")
        return self.group.rank == 0

    def combine_norms(self, managed: Sequence[Managed], norms: Buffer) -> None:
        """Enqueue it: the square sums of slices in `norms`, which host has written, become those of the parameters."""
        device, size, number = self._device, self.group.size, len(managed)
        if number != self._num_params:
            self._num_params = number
            self._all = device.buffer("norms of all slices", size * number, torch.float64, "host", on_link=True)
            self._own = device.buffer("norms of own slices", number, torch.float64, "host", on_link=True)
            self._all_dev = device.buffer("norms of slices on the device", size * number, torch.float64, "device")
        device.host_task("norm: own slices", partial(_copy, norms, self._own), reads=[norms], writes=[self._own])
        device.wait(UP, device.record(HOST), "own norms: they must be written before they leave")
        own_dev = self._all_dev.part(self.group.rank * number, number)
        device.copy_up("up: norms of slices", own_dev, self._own, [Run(0, number)])
        device.wait(COMM, device.record(UP), "norms on the device: they must be there before all have them")
        self.group.collective("all-gather: norms of slices", all_gather, self._all_dev, own_dev)
        device.wait(DOWN, device.record(COMM), "gathered norms: those of all ranks must be there")
        device.copy_down("down: norms of slices", self._all, self._all_dev, [Run(0, size * number)])
        device.wait(HOST, device.record(DOWN), "arrived norms: the sums need those of all ranks")
        add = partial(_add_slices, self._all, np.array([is_cut(one.tensor) for one in managed], bool), norms)
        device.host_task("norm: slices", add, reads=[self._all], writes=[norms])

    def close(self) -> None:
        self.group.close()


def _copy(source: Buffer, into: Buffer) -> None:
    np.copyto(into.tensor.numpy(), source.tensor.numpy()[: into.tensor.numel()])


def _add_slices(gathered: Buffer, is_cut: np.ndarray, norms: Buffer) -> None:
    """Slices are added in the order of the ranks; of what is not cut, all take the first rank's.

    Of what is not finite on any rank, the sum is not, so that all ranks skip the step.
    """
    by_rank = gathered.tensor.numpy().reshape(-1, len(is_cut))
    total = np.add.accumulate(by_rank, axis=0)[-1]
    norms.tensor.numpy()[: len(is_cut)] = np.where(is_cut | ~np.isfinite(total), total, by_rank[0])
