"""What many ranks save: their shards, in one checkpoint that fits any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zofftk
from tests.rank_processes import run_ranks
from tests.test_ranks import HYPER, alone, mlp, optimizer, same_on_all_ranks, train
from zofftk.sharding.saving import load_sharded, save_sharded

SHAPES = [(7,), (3, 5), (1,), ()]


def params():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def exact_step(params, opt, step):
    """The same mean gradient on any number of ranks, with exact sums."""
    for number, p in enumerate(params):
        p.grad = torch.full_like(p, (step + 1) * (number + 1) / 4)
    opt.step()
    opt.zero_grad()


def b09(size, folder, first, last, *, resume, save):
    def work(rank):
        own = params()
        opt = zofftk.OffloadAdamW(own, **HYPER)
        content = {"model": dict(enumerate(own)), "optimizer": opt}
        content = {"model": {str(i): p.data for i, p in enumerate(own)}, "optimizer": opt}
        if resume:
            load_sharded(content, folder)
        for step in range(first, last):
            exact_step(own, opt, step)
        if save:
            save_sharded(content, folder)
        states = [opt.state[p] for p in own]
        full = [{k: v.full() if hasattr(v, "full") else v.clone() for k, v in state.items()} for state in states]
        opt.close()
        return [p.detach() for p in own], full

    return run_ranks(size, work)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 3), (2, 4), (1, 2), (4, 2)])
def test_b09_saved_on_some_ranks_resumed_on_others(sizes, tmp_path):
    saved_on, resumed_on = sizes
    ((expected, states),) = b09(1, tmp_path / "none", 0, 5, resume=False, save=False)
    b09(saved_on, tmp_path / "run", 0, 3, resume=False, save=True)
    for values, resumed in b09(resumed_on, tmp_path / "run", 3, 5, resume=True, save=False):
        for p, q in zip(values, expected, strict=True):
            assert torch.equal(p, q)
        for state, other in zip(resumed, states, strict=True):
            assert state.keys() == other.keys()
            for key in state:
                assert torch.equal(state[key], other[key]), key


def test_a_missing_shard_is_named_before_anything_changes(tmp_path):
    b09(2, tmp_path / "run", 0, 3, resume=False, save=True)
    (tmp_path / "run" / "__1_0.distcp").unlink()

    def work(rank):
        own = params()
        opt = zofftk.OffloadAdamW(own, **HYPER)
        exact_step(own, opt, 0)
        before = [p.detach().clone() for p in own]
        masters = [opt.state[p]["master"].full() for p in own]
        with pytest.raises(FileNotFoundError, match="__1_0.distcp"):
            load_sharded({"model": {str(i): p.data for i, p in enumerate(own)}, "optimizer": opt}, tmp_path / "run")
        for p, q, master in zip(own, before, masters, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(opt.state[p]["master"].full(), master)
        opt.close()

    run_ranks(2, work)


def test_torch_takes_a_whole_state_over_and_gives_it_back(tmp_path):
    def work(rank):
        from zofftk.sharding.full import gather_full

        own = params()
        opt = zofftk.OffloadAdamW(own, **HYPER)
        for step in range(2):
            exact_step(own, opt, step)
        whole = gather_full(opt.state_dict())
        if rank == 0:
            zofftk.save(tmp_path / "whole.pt", whole)
            plain = [nn.Parameter(p.detach().clone()) for p in own]
            torch_opt = torch.optim.AdamW(plain, **HYPER)
            torch_opt.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
            assert torch_opt.state[plain[1]]["exp_avg"].shape == (3, 5)
        dist.barrier()
        again = params()
        other = zofftk.OffloadAdamW(again, **HYPER)
        with torch.no_grad():
            for p, q in zip(again, own, strict=True):
                p.copy_(q)
        other.load_state_dict(zofftk.load(tmp_path / "whole.pt"))
        for o, values in ((opt, own), (other, again)):
            exact_step(values, o, 2)
        for p, q in zip(own, again, strict=True):
            assert torch.equal(p, q)
        opt.close()
        other.close()

    run_ranks(2, work)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    def work(rank):
        for options in ({}, {"update": "delayed", "delay_after": 1}):
            folder = tmp_path / str(len(options))
            model = mlp(torch.bfloat16)
            opt = optimizer(model, rank, **options)
            train(model, opt, 3, 2, rank)
            save_sharded({"model": model, "optimizer": opt}, folder, wait=False).wait()
            expected = train(model, opt, 3, 2, rank)
            again = mlp(torch.bfloat16)
            other = optimizer(again, rank, **options)
            load_sharded({"model": again, "optimizer": other}, folder)
            assert train(again, other, 3, 2, rank) == expected
            for o in (opt, other):
                o.flush()
            assert same_on_all_ranks(again.parameters())
            for p, q in zip(model.parameters(), again.parameters(), strict=True):
                assert torch.equal(p, q)
            opt.close()
            other.close()

    run_ranks(2, work)


def test_a_state_of_other_ranges_is_refused():
    def work(rank):
        own = params()
        one, opt = zofftk.OffloadAdamW(params(), process_group=alone(rank), **HYPER), zofftk.OffloadAdamW(own, **HYPER)
        exact_step(own, opt, 0)
        with pytest.raises((RuntimeError, ValueError), match="rank|full"):
            one.load_state_dict(opt.state_dict())
        opt.close()
        one.close()

    run_ranks(2, work)
