"""Parameters that are DTensors, known by their looks: torch's module for them takes long to import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sliced(tensor: torch.Tensor) -> bool:
    """A DTensor."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What is in this rank's memory: the tensor itself, or a DTensor's slice."""
    return tensor._local_tensor if is_sliced(tensor) else tensor  # type: ignore[attr-defined]


def slice_of(param: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What turns a gradient of `param` into that of this rank's slice; None where they are the same."""
    if not is_sliced(param):
        return None
    sliced: Any = param

    def take_slice(grad: Any) -> torch.Tensor:
        if not is_sliced(grad):
            raise TypeError(f"the gradient of a DTensor is a {type(grad).__name__}, expected a DTensor")
        return grad.redistribute(sliced.device_mesh, sliced.placements).to_local()

    return take_slice


def mesh_of(params: Sequence[torch.Tensor]) -> DeviceMesh | None:
    """The mesh of those that are DTensors; ValueError where there are several."""
    meshes: list[Any] = []
    for param in params:
        if is_sliced(param) and (mesh := param.device_mesh) not in meshes:  # type: ignore[attr-defined]
            meshes.append(mesh)
    if not meshes:
        return None
    if len(meshes) > 1 or meshes[0].ndim != 1:
        raise ValueError(f"the parameters' DTensors lie on {meshes}, expected a single mesh of one dimension")
    return meshes[0]
