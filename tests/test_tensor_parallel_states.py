"""The states of parameters that are cut over ranks: shown, saved, made whole, and read on any mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zofftk
from tests.parallel_model import build, mesh_of_sizes, train, whole
from tests.rank_processes import run_ranks
from tests.test_tensor_parallel import HYPER, optimizer

# Shapes, and how they are cut: unevenly, along every dimension, with nothing left for some ranks, or not at all.
CUTS = [
    ((7,), Shard(0)),
    ((3, 5), Shard(1)),
    ((3, 5), Shard(0)),
    ((1, 4), Shard(0)),
    ((2, 3, 4), Shard(2)),
    ((40, 9), Shard(1)),
    ((5, 3), Replicate()),
    ((6,), None),
    ((0, 3), Shard(1)),
    ((), Replicate()),
]


def params(mesh=None, dtype=torch.float32):
    """Plain ones without a mesh."""
    torch.manual_seed(0)
    made = []
    for shape, cut in CUTS:
        value = torch.randn(shape).to(dtype)
        if mesh is not None and cut is not None:
            value = distribute_tensor(value, mesh, [cut])
        made.append(nn.Parameter(value))
    return made


def exact_gradient(p, number, step):
    """The same mean on any number of ranks, with exact sums."""
    grad = (torch.arange(p.numel()).view(p.shape) % 3 + 1) * (step + 1) * (number + 1) / 4
    if not isinstance(p, DTensor):
        return grad.to(p.dtype)
    return distribute_tensor(grad.to(p.dtype), p.device_mesh, p.placements)


def exact_step(own, opt, step):
    for number, p in enumerate(own):
        p.grad = exact_gradient(p, number, step)
    opt.step()
    opt.zero_grad()


def run(sizes, folder, first, last, *, resume=False, save=False, wait=True, **options):
    """Every rank's whole parameters and states after steps on a mesh; of one rank for data and tensors, without."""

    def work(rank):
        own = params(mesh_of_sizes(*sizes)["tp"] if sizes[1] > 1 else None)
        opt = zofftk.OffloadAdamW(own, **HYPER, **options)
        content = {"model": {str(i): p.detach() for i, p in enumerate(own)}, "optimizer": opt}
        if resume:
            zofftk.load_sharded(content, folder)
        for step in range(first, last):
            exact_step(own, opt, step)
        if save:
            zofftk.save_sharded(content, folder, wait=wait).wait()
        opt.flush()
        full = zofftk.gather_full(list(opt.state_dict()["state"].values()), dst=None)
        full = [{key: value.clone() for key, value in state.items()} for state in full]
        values = [whole(p) for p in own]
        opt.close()
        return values, full

    return run_ranks(sizes[0] * sizes[1], work)


def assert_same(results, expected):
    ((values, states),) = expected
    for their_values, their_states in results:
        for p, q in zip(their_values, values, strict=True):
            assert torch.equal(p, q)
        for state, other in zip(their_states, states, strict=True):
            assert state.keys() == other.keys()
            for key in state:
                assert torch.equal(state[key], other[key]), key


@pytest.mark.parametrize("sizes", [((2, 2), (1, 1)), ((2, 2), (4, 1)), ((1, 1), (1, 2)), ((1, 3), (2, 2))])
def test_saved_on_one_mesh_resumed_on_another(sizes, tmp_path):
    expected = run((1, 1), None, 0, 5)
    saved_on, resumed_on = sizes
    run(saved_on, tmp_path / "run", 0, 3, save=True, wait=saved_on != (2, 2))
    assert_same(run(resumed_on, tmp_path / "run", 3, 5, resume=True), expected)


def test_a_delayed_update_is_saved_with_what_is_late(tmp_path):
    options = {"update": "delayed", "delay_after": 1}
    expected = run((1, 1), None, 0, 5, **options)
    run((2, 2), tmp_path / "run", 0, 3, save=True, **options)
    assert_same(run((1, 2), tmp_path / "run", 3, 5, resume=True, **options), expected)


def test_a_model_goes_on_as_if_nothing_had_happened(tmp_path):
    def work(rank):
        mesh = mesh_of_sizes(2, 2)
        model = build(torch.bfloat16, mesh["tp"])
        opt = optimizer(model)
        train(model, opt, 2, mesh)
        zofftk.save_sharded({"model": model, "optimizer": opt}, tmp_path / "run")
        expected = train(model, opt, 2, mesh, first=2)
        again = build(torch.bfloat16, mesh["tp"])
        other = optimizer(again)
        # Values that are read into the memory of a DTensor are seen, whoever puts them there.
        zofftk.load_sharded({"model": again.state_dict(), "optimizer": other}, tmp_path / "run")
        assert train(again, other, 2, mesh, first=2) == expected
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(whole(p), whole(q))
        for o in (opt, other):
            o.close()

    run_ranks(4, work)


def test_torch_takes_a_whole_state_over_and_gives_it_back(tmp_path):
    def work(rank):
        mesh = mesh_of_sizes(2, 2)["tp"]
        own = params(mesh)
        opt = zofftk.OffloadAdamW(own, **HYPER)
        for step in range(2):
            exact_step(own, opt, step)
        full, values = zofftk.gather_full(opt.state_dict()), [whole(p) for p in own]
        if rank == 0:
            zofftk.save(tmp_path / "whole.pt", full)
        dist.barrier()
        plain = [nn.Parameter(value.clone()) for value in values]
        hyper = {key: value for key, value in HYPER.items() if key != "bucket_bytes"}
        theirs = torch.optim.AdamW(plain, **hyper)
        theirs.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
        again = params(mesh)
        other = zofftk.OffloadAdamW(again, **HYPER)
        with torch.no_grad():
            for p, q in zip(again, own, strict=True):
                p.copy_(q)
        other.load_state_dict(zofftk.load(tmp_path / "whole.pt"))
        for o, parameters in ((opt, own), (other, again), (theirs, plain)):
            exact_step(parameters, o, 2)
        for p, q, r in zip(own, again, plain, strict=True):
            assert torch.equal(whole(p), whole(q))
            torch.testing.assert_close(whole(p), r.detach())
        opt.close()
        # From torch's optimizer of DTensors, and from one of ours to another of the same mesh.
        cut = params(mesh)
        of_cut = torch.optim.AdamW(cut, **hyper, foreach=False)
        exact_step(cut, of_cut, 0)
        third = zofftk.OffloadAdamW(params(mesh), **HYPER)
        third.load_state_dict(of_cut.state_dict())
        assert torch.equal(third.state_dict()["state"][1]["exp_avg"].full(), whole(of_cut.state[cut[1]]["exp_avg"]))
        third.load_state_dict(other.state_dict())
        moment = other.state_dict()["state"][5]["exp_avg"]
        assert torch.equal(third.state_dict()["state"][5]["exp_avg"].full(), moment.full())
        for o in (other, third):
            o.close()

    run_ranks(4, work)
