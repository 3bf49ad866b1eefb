"""Parameters that are DTensors, known by their looks: torch's module for them takes long to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def is_sliced(tensor: object) -> bool:
    """A DTensor."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def is_cut(tensor: Any) -> bool:
    """A DTensor of which each rank holds other elements."""
    return is_sliced(tensor) and any(placement.is_shard() for placement in tensor.placements)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What is in this rank's memory: the tensor itself, or a DTensor's slice."""
    return tensor._local_tensor if is_sliced(tensor) else tensor  # type: ignore[attr-defined]


def slice_box(tensor: Any) -> Box | None:
    """Which box of a tensor this rank holds; None for all of it. Slices may be uneven, and empty."""
    if not is_cut(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def placed(tensor: Any) -> tuple[Any, ...] | None:
    """What has to be alike for two tensors to have the same slices."""
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sliced(tensor) else None


def to_slice(param: Any, grad: Any, name: str) -> torch.Tensor:
    """Of a gradient of `param`, that of what is in this rank's memory. Where its placement differs, a collective."""
    if is_sliced(param) != is_sliced(grad):
        kinds = [type(tensor).__name__ if is_sliced(tensor) else "plain tensor" for tensor in (grad, param)]
        raise TypeError(f"the gradient of {name} is a {kinds[0]}, expected a {kinds[1]} as the parameter is")
    if not is_sliced(param):
        return grad
    if grad.device_mesh != param.device_mesh:
        raise ValueError(f"the gradient of {name} is on {grad.device_mesh}, expected {param.device_mesh}")
    local = grad.detach().redistribute(param.device_mesh, param.placements)._local_tensor
    return local.wait() if hasattr(local, "wait") else local  # the result of a collective that may be under way


def from_slice(param: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor like `param` of what each rank has in its memory: the inverse of `to_slice`."""
    if not is_sliced(param):
        return local
    from torch.distributed.tensor import DTensor

    strides = param.stride() if param.is_contiguous() else torch.empty(param.shape, device="meta").stride()
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=strides
    )


def as_placed(param: Any, local: torch.Tensor, placements: Sequence[Any]) -> torch.Tensor:
    """Of a gradient's part in this rank's memory, the gradient of `param` with these placements, if it has any."""
    if not placements:
        return local
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = param.device_mesh, param.shape, param.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def check_placement(param: Any, name: str) -> None:
    """A DTensor whose slices an optimizer can update, each rank its own."""
    if not is_sliced(param):
        return
    if param.device_mesh.ndim != 1:
        raise ValueError(f"{name} is a DTensor on {param.device_mesh}, expected a mesh of one dimension")
    if not all(placement.is_shard() or placement.is_replicate() for placement in param.placements):
        raise ValueError(f"{name} is placed {tuple(param.placements)}, expected Shard or Replicate")


def mesh_of(params: Sequence[torch.Tensor]) -> DeviceMesh | None:
    """The mesh of those that are DTensors; ValueError where there are several."""
    meshes: list[Any] = []
    for param in params:
        if is_sliced(param) and (mesh := param.device_mesh) not in meshes:  # type: ignore[attr-defined]
            meshes.append(mesh)
    if len(meshes) > 1:
        raise ValueError(f"the parameters' DTensors lie on {meshes}, expected a single mesh")
    return meshes[0] if meshes else None
