"""A model as large as one likes: built on the meta device, then given fake tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zofftk.ranks.slices import from_slice, local_of


def build_fake(build: Callable[[], nn.Module], fake: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """What `build` makes, without its data; floating-point tensors become `dtype`, if given. Tied ones stay tied.

    Raises:
        TypeError: `build` returns no module.
    """
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a function that builds a torch module, it returned {type(model).__name__}")
    known: dict[int, torch.Tensor] = {}

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            here = local_of(tensor)
            with fake:
                value = torch.empty_strided(here.shape, here.stride(), dtype=kind, device="cpu")
            value = from_slice(tensor, value)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            known[id(tensor)] = value
        return known[id(tensor)]

    kept = [*model.parameters(), *model.buffers()]  # an id is of one object as long as that lives
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            kept_here: Any = tensors
            for name, tensor in tensors.items():
                if tensor is not None:
                    kept_here[name] = faked(tensor)
    del kept
    return model
