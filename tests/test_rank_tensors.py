"""What goes through the process group are tensors of the device, and one rank in a group is one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zofftk
from tests.rank_processes import run_ranks
from zofftk.device.emulated import EmulatedDevice
from zofftk.ranks import collectives


class OwnMemory(EmulatedDevice):
    """Knows which memory is the device's: a GPU's process group takes no other."""

    def __init__(self):
        super().__init__(poison=True)
        self.owned: set[int] = set()

    def buffer(self, name, numel, dtype, place, **options):
        buffer = super().buffer(name, numel, dtype, place, **options)
        if place == "device":
            self.own(buffer.tensor)
        return buffer

    def own(self, tensor):
        self.owned.add(tensor.untyped_storage().data_ptr())


def refuse_the_hosts(device, called):
    """Have torch.distributed do as a backend without CPU tensors, which these are that `device` does not own."""

    def guarded(name, operation):
        def run(*tensors, **options):
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in device.owned:
                    raise RuntimeError(f"No backend type associated with device type cpu ({name})")
            called.add(name)
            return operation(*tensors, **options)

        return run

    for module, name in (
        (collectives, "_all_gather"),
        (collectives, "_reduce_scatter"),
        (dist, "all_reduce"),
    ):
        setattr(module, name, guarded(name, getattr(module, name)))


def test_b18_a_group_that_takes_tensors_of_the_device_alone():
    def work(rank):
        device, called = OwnMemory(), set()
        refuse_the_hosts(device, called)
        params = [nn.Parameter(torch.zeros(4096)) for _ in range(2)]  # one on each rank
        with pytest.raises(RuntimeError, match="No backend type"):
            dist.all_reduce(torch.ones(1))
        opt = zofftk.OffloadAdamW(params, lr=0.1, bucket_bytes=2 * 4096 * 4, device=device)
        for p, value in zip(params, (3.0, 4.0), strict=True):
            opt.set_grad(p, F.one_hot(torch.tensor(7), 4096).float() * value)
        assert nn.utils.clip_grad_norm_(params, 1.0).item() == 5.0
        opt.step()
        held = [(i, part.values[7]) for i, p in enumerate(params) for part in opt.state[p]["exp_avg"].parts]
        assert held == [(1 - rank, pytest.approx((0.07999998, 0.05999999)[rank], abs=1e-8))]
        assert called == {"_all_gather", "_reduce_scatter"}
        opt.close()

    run_ranks(2, work)


def test_b17_b18_a_group_of_one():
    def work(rank):
        params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
        opt = zofftk.OffloadAdamW(params, process_group=dist.group.WORLD)
        (3 * params[0] + 4 * params[1]).backward()
        assert nn.utils.clip_grad_norm_(params, 1.0).item() == 5.0
        assert [opt.grad(p).item() for p in params] == pytest.approx([0.5999999, 0.7999998], abs=1e-7)
        opt.close()

        moments = {}
        for reentrant in (None, True, False):
            torch.manual_seed(3)
            layer, x = nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
            opt = zofftk.OffloadAdamW(layer.parameters())
            for _ in range(3):
                x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            x.sum().backward()
            opt.step()
            opt.zero_grad()
            moments[reentrant] = opt.state[layer.weight]["exp_avg"].clone()
            first, second = layer(torch.ones(2, 8)).sum(), layer(torch.zeros(2, 8)).sum()
            first.backward(retain_graph=True)
            second.backward()
            assert opt.grad(layer.weight).tolist() == [[2.0] * 8] * 8
            assert opt.grad(layer.bias).tolist() == [4.0] * 8
            opt.close()
        for reentrant in (True, False):
            torch.testing.assert_close(moments[reentrant], moments[None], rtol=1e-6, atol=1e-7)

    run_ranks(1, work)
