"""Parameters whose class answers torch's operations itself, sharded ones among them, are refused at the door."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zofftk

pytestmark = pytest.mark.usefixtures("no_threads_left")
MESSAGE = "is a {}, a class with a __torch_dispatch__ of its own, expected a plain tensor .* not supported yet"


class Scaled(torch.Tensor):
    """What it holds is not what its elements are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(arg.inner * 2 if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


class Named(nn.Parameter):
    pass


@pytest.fixture
def one_rank():
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_parameters_are_refused(one_rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match="'0.weight' " + MESSAGE.format("DTensor")):
        zofftk.OffloadAdamW(model.named_parameters())


def test_a_wrapper_is_refused_later_too():
    opt = zofftk.OffloadAdamW([Named(torch.ones(4))])  # a class that leaves the operations to torch will do
    with pytest.raises(TypeError, match="parameter 0 of group 1 " + MESSAGE.format("Scaled")):
        opt.add_param_group({"params": [Scaled(torch.ones(4))]})
    assert len(opt.param_groups) == 1
    opt.close()
