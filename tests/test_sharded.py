"""Parameters whose class answers torch's operations itself: DTensors are taken, whoever made them, others refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn import functional as F

import zofftk
from tests.rank_processes import run_ranks
from tests.test_ranks import batch, mlp, optimizer

MESSAGE = "is a {}, a class with a __torch_dispatch__ of its own, expected a plain tensor "


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


@pytest.mark.usefixtures("no_threads_left")
def test_a_wrapper_is_refused_later_too():
    opt = zofftk.OffloadAdamW([Named(torch.ones(4))])  # a class that leaves the operations to torch will do
    with pytest.raises(TypeError, match="parameter 0 of group 1 " + MESSAGE.format("Scaled")):
        opt.add_param_group({"params": [Scaled(torch.ones(4))]})
    assert len(opt.param_groups) == 1
    opt.close()


def train(model, opt, steps, rank, size, micro):
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for part in range(micro):
            x, y = (t.chunk(size)[rank] for t in batch(step * micro + part))
            if size > 1:
                model.set_requires_gradient_sync(part == micro - 1)
            loss = F.mse_loss(model(x), y) / micro
            loss.backward()
            total += loss.detach()
        if size > 1:
            dist.all_reduce(total)
        opt.step()
        opt.zero_grad()
        losses.append(total.item() / size)
    return losses


def test_fully_sharded_parameters_are_offloaded_where_torch_has_put_them():
    """FSDP2 averages the gradients and hands each rank those of its slices, by the hooks that we take them from."""

    def work(rank):
        for size, options in ((3, {"max_grad_norm": 0.1}), (3, {"update": "delayed", "delay_after": 2})):
            for micro in (1, 2):
                model, whole = mlp(), mlp()
                mesh = init_device_mesh("cpu", (size,))
                for layer in model:
                    if isinstance(layer, nn.Linear):
                        fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
                alone = dist.new_group([rank], use_local_synchronization=True)
                opt, one = optimizer(model, rank, **options), optimizer(whole, process_group=alone, **options)
                zofftk.offload(model, opt)
                losses = train(model, opt, 6, rank, size, micro)
                assert losses == pytest.approx(train(whole, one, 6, 0, 1, micro), rel=1e-5)
                assert opt.last_grad_norm == pytest.approx(one.last_grad_norm, rel=1e-5)
                model(batch(0)[0]).sum().backward()
                with pytest.raises(AssertionError, match="to be DTensor, got .*StandIn"):
                    model(batch(0)[0]).sum().backward()  # torch adds up whole gradients alone, see above
                for o in (opt, one):
                    o.flush()
                for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                    torch.testing.assert_close(p.full_tensor().detach(), q.detach(), rtol=0, atol=3e-4)
                    assert opt.state[p]["exp_avg"].numel_here == p.to_local().numel()
                for o in (opt, one):
                    o.close()

    run_ranks(3, work)
