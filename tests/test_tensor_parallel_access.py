"""What users do to parameters and gradients that are DTensors, and what is refused at the door."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import zofftk
from tests.parallel_model import backward, build, mesh_of_sizes, same_everywhere, train, uncut, whole
from tests.rank_processes import run_ranks
from tests.test_tensor_parallel import HYPER, alone, optimizer
from zofftk.errors import RankError


def expected_gradients(mesh, number=0):
    """What autograd leaves where there is no optimizer."""
    model = build(mesh=mesh)

    class Unscaled:
        scale_loss = staticmethod(lambda loss: loss)

    backward(model, Unscaled, number)
    return [whole(p.grad) for p in model.parameters()]


def test_gradients_are_read_and_set_as_dtensors():
    def work(rank):
        mesh = mesh_of_sizes(1, 2)["tp"]
        expected = expected_gradients(mesh)
        model = build(mesh=mesh)
        opt = optimizer(model, loss_scale=4.0)
        params = list(model.parameters())
        backward(model, opt, 0)
        for p, grad in zip(params, expected, strict=True):
            own = opt.grad(p)
            assert type(own) is type(p.data)
            assert getattr(own, "placements", None) == getattr(p, "placements", None)
            torch.testing.assert_close(whole(own), grad)
            torch.testing.assert_close(whole(copy.deepcopy(p.grad)), grad)
        # In another placement, partial sums among them, and put there by hand.
        up, norm = model.blocks[0].up.weight, model.norm.weight
        opt.set_grad(up, distribute_tensor(torch.ones(up.shape), mesh, [Replicate()]))
        assert torch.equal(whole(opt.grad(up)), torch.ones(up.shape))
        opt.set_grad(norm, DTensor.from_local(torch.ones(norm.shape), mesh, [Partial()]))
        assert torch.equal(whole(opt.grad(norm)), torch.full(norm.shape, 2.0))
        norm.grad = distribute_tensor(torch.full(norm.shape, 12.0), mesh, [Shard(0)])
        assert torch.equal(whole(opt.grad(norm)), torch.full(norm.shape, 3.0))
        with pytest.raises(TypeError, match="the gradient of 'norm.weight' is a plain tensor, expected a DTensor"):
            opt.set_grad(norm, torch.ones(norm.shape))
        with pytest.raises(TypeError, match="the gradient of 'temperature' is a DTensor, expected a plain tensor"):
            opt.set_grad(model.temperature, distribute_tensor(torch.ones(3), mesh, [Replicate()]))
        opt.zero_grad(set_to_none=False)
        assert all(not whole(opt.grad(p)).any() for p in params)
        opt.step()
        assert opt.last_grad_norm == 0.0
        opt.close()

    run_ranks(2, work)


def test_edits_loads_and_freezes_are_seen():
    def work(rank):
        mesh = mesh_of_sizes(1, 2)
        model, single = build(mesh=mesh["tp"]), build()
        pairs = [(model, optimizer(model)), (single, optimizer(single, process_group=alone()))]
        other = build()
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.5)
        full = {key: value.detach().clone() for key, value in other.state_dict().items()}
        for m, opt in pairs:
            losses = train(m, opt, 2, mesh if m is model else None)
            with torch.no_grad():
                m.blocks[0].up.weight.mul_(0.5)
                m.temperature.add_(0.25)
            losses += train(m, opt, 1, mesh if m is model else None)
            for p in (m.blocks[0].down.weight, m.norm.weight):
                getattr(p, "_local_tensor", p.data).mul_(2)
            opt.refresh()
            losses += train(m, opt, 1, mesh if m is model else None)
            m.blocks[1].requires_grad_(False)
            losses += train(m, opt, 1, mesh if m is model else None)
            m.blocks[1].requires_grad_(True)
            loaded = {
                key: distribute_tensor(full[key], p.device_mesh, p.placements) if isinstance(p, DTensor) else full[key]
                for key, p in m.state_dict().items()
            }
            m.load_state_dict(loaded)
            losses += train(m, opt, 1, mesh if m is model else None)
            m.load_state_dict({key: value.clone() for key, value in loaded.items()}, assign=True)
            m.head.weight = m.embed.weight
            opt.adopt_replaced()
            losses += train(m, opt, 2, mesh if m is model else None)
            if m is model:
                first = losses
        assert first == pytest.approx(losses, rel=1e-5)
        assert same_everywhere(uncut(model))
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=0, atol=2e-4)
        opt = pairs[0][1]
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.deepcopy(opt)
        with pytest.raises(TypeError, match=r"cannot be pickled.*zofftk\.save_sharded"):
            pickle.dumps(opt.state[model.blocks[0].up.weight]["exp_avg"])
        for _, o in pairs:
            o.close()

    run_ranks(2, work)


def test_what_does_not_fit_is_refused():
    def work(rank):
        flat, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        value = torch.ones(4, 4)

        def refused(message, *tensors, error=ValueError, **options):
            with pytest.raises(error, match=message):
                zofftk.OffloadAdamW([(f"p{i}", nn.Parameter(t)) for i, t in enumerate(tensors)], **HYPER, **options)

        cut = distribute_tensor(value, flat, [Shard(0)])
        refused("'p0' is a DTensor on .*, expected a mesh of one dim", distribute_tensor(value, square, [Shard(0)] * 2))
        refused("'p0' is placed .*Partial.*, expected Shard or Rep", DTensor.from_local(value, flat, [Partial()]))
        refused("expected a single mesh", cut, distribute_tensor(value, square["b"], [Shard(0)]))
        refused("process_group is that of ranks .*, some of which hold other", cut, process_group=dist.group.WORLD)
        refused("ranks 0 and 1 do not train the same", cut, *[value] * rank, error=RankError)
        opt = zofftk.OffloadAdamW([nn.Parameter(value.clone())], process_group=alone(), **HYPER)
        with pytest.raises(ValueError, match="a parameter is a DTensor on .*, expected plain ones"):
            opt.add_param_group({"params": [nn.Parameter(cut)]})
        assert len(opt.param_groups) == 1
        opt.close()

    run_ranks(2, work)


def test_a_group_of_ranks_with_other_slices_is_refused():
    def work(rank):
        mesh = mesh_of_sizes(2, 2)["tp"]
        diagonal = dist.new_group([rank, 3 - rank], use_local_synchronization=True)
        cut = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        with pytest.raises(RankError, match=r"ranks \d and \d do not train the same parameters: .*slice"):
            zofftk.OffloadAdamW([cut], process_group=diagonal, **HYPER)

    run_ranks(4, work)
