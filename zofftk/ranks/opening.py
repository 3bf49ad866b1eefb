"""The ranks that share the states: those of a process group, or one alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zofftk.config import OffloadConfig
from zofftk.device.base import Device
from zofftk.ranks.one import OneRank, Ranks
from zofftk.ranks.slices import mesh_of
from zofftk.ranks.virtual_group import VirtualGroup
from zofftk.ranks.world import has_world
from zofftk.threads import usable_threads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from zofftk.ranks.group import RankGroup
    from zofftk.ranks.tensor_parallel import TensorParallel

COMPARED = (  # options that change what ranks send each other, or what they make of it
    "max_grad_norm",
    "bucket_bytes",
    "wire_dtype",
    "reduce_dtype",
    "loss_scale",
    "update",
    "delay_after",
)


def check_ranks(config: OffloadConfig, params: Sequence[torch.Tensor]) -> None:
    """Raises ValueError where `open_ranks` would."""
    group = config.process_group
    if isinstance(group, VirtualGroup):
        return
    if not (group is None or isinstance(group, dist.ProcessGroup)) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"process_group must be a group of torch.distributed, or None, got {group!r}")
    if has_world():
        _sharing_ranks(config, mesh_of(params))


def check_later(before: Sequence[torch.Tensor], later: Sequence[torch.Tensor]) -> None:
    """Raises ValueError where parameters come to an optimizer that was built for others."""
    built_for = mesh_of(before)
    if mesh_of([*before, *later]) != built_for:
        raise ValueError(
            f"a parameter is a DTensor on {mesh_of(later)}, expected plain ones, as those are that the optimizer was "
            "built with: give it some of the DTensors when it is built"
        )


def open_ranks(config: OffloadConfig, device: Device, params: Sequence[torch.Tensor], kind: str) -> Ranks:
    """Of `config.process_group`; by default of all ranks that hold other data and the same slices.

    Raises RankError where they were given other options, or another `kind` of optimizer.
    """
    threads = config.threads or usable_threads()
    if isinstance(virtual := config.process_group, VirtualGroup):
        if virtual.size == 1:
            return OneRank(device)
        from zofftk.ranks.virtual import VirtualRanks

        virtual.open(device)
        return VirtualRanks(device, virtual, threads, config.reduce_dtype)
    if not has_world():
        return OneRank(device)
    ranks = _sharing_ranks(config, mesh_of(params))
    if len(ranks) == 1:
        return OneRank(device)
    from zofftk.ranks.group import RankGroup
    from zofftk.ranks.many import ManyRanks

    group = RankGroup(device, ranks, config.rank_timeout_s)
    _check_options(config, kind, group)
    return ManyRanks(device, group, threads, config.reduce_dtype)


def _check_options(config: OffloadConfig, kind: str, group: RankGroup) -> None:
    options = [kind, *(f"{name}={getattr(config, name)}" for name in COMPARED)]
    try:
        group.check_same(options, "comparison of options", "were given other options")
    except Exception:
        group.close()  # it has a thread
        raise


def open_tensor_parallel(
    config: OffloadConfig, device: Device, params: Sequence[torch.Tensor], kind: str
) -> TensorParallel | None:
    """The ranks with the other slices, if parameters are DTensors on more than one."""
    mesh = mesh_of(params)
    if mesh is None or mesh.size() == 1:
        return None
    from zofftk.ranks.group import RankGroup
    from zofftk.ranks.tensor_parallel import TensorParallel

    if isinstance(config.process_group, VirtualGroup):
        virtual = VirtualGroup(mesh.size())
        virtual.open(device)
        return TensorParallel(device, virtual)
    group = RankGroup(device, mesh.mesh.flatten().tolist(), config.rank_timeout_s)
    _check_options(config, kind, group)
    return TensorParallel(device, group)


def _sharing_ranks(config: OffloadConfig, mesh: DeviceMesh | None) -> list[int]:
    ranks = _data_parallel_ranks(config, mesh)
    if dist.get_rank() not in ranks:
        raise ValueError(f"process_group is that of ranks {ranks}, expected one with this rank, {dist.get_rank()}")
    if mesh is not None and set(ranks) & set(mesh.mesh.flatten().tolist()) != {dist.get_rank()}:
        raise ValueError(
            f"process_group is that of ranks {ranks}, some of which hold other slices of the parameters, on {mesh}: "
            "expected the group of the data-parallel dimension, such as mesh['dp'].get_group()"
        )
    return ranks


def _data_parallel_ranks(config: OffloadConfig, mesh: DeviceMesh | None) -> list[int]:
    group = config.process_group
    assert not isinstance(group, VirtualGroup)
    if group is None and mesh is not None:
        root = mesh._get_root_mesh()
        others = [name for name in root.mesh_dim_names or () if name not in (mesh.mesh_dim_names or ())]
        if root.ndim == 1 and root.size() == dist.get_world_size():
            return [dist.get_rank()]
        if len(others) != 1 or root.size() != dist.get_world_size():
            raise ValueError(
                f"parameters are DTensors on {mesh}, a part of {root}: give process_group=, the group of the ranks "
                "that hold the same slices and train on other data"
            )
        group = root[others[0]].get_group()
    if group is None:
        return list(range(dist.get_world_size()))
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to ranks that are not in it
        raise ValueError(f"process_group is one without this rank, {dist.get_rank()}: expected one that it is in")
    return dist.get_process_group_ranks(group)
