"""Over ranks: parameters that are unfrozen while training goes on, and states of some that are frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zofftk
from tests.rank_processes import run_ranks
from tests.test_ranks import alone
from zofftk.errors import RankError


def params(frozen=()):
    torch.manual_seed(0)
    made = {name: nn.Parameter(torch.randn(100)) for name in "abc"}
    for name in frozen:
        made[name].requires_grad_(False)
    return made


def optimizer(named, **options):
    return zofftk.OffloadAdamW(named.items(), lr=0.1, **options)


def backward(named, opt, factor):
    opt.scale_loss(sum((p * p).sum() * factor for p in named.values() if p.requires_grad)).backward()


def test_clipping_in_the_step_after_an_unfreeze():
    """Its gradient counts where the optimizer has heard of it before the backward; otherwise no rank goes on."""

    def hears(named, opt, how, factor):
        named["b"].requires_grad_(True)
        if how == "zero_grad":
            opt.zero_grad()
        if how == "scale_loss":
            backward(named, opt, factor)
        else:
            sum((p * p).sum() * factor for p in named.values()).backward()

    def clipped_step(named, opt, how):
        norm = None if how == "max_grad_norm" else nn.utils.clip_grad_norm_(named.values(), 1.0).item()
        opt.step()
        return norm or opt.last_grad_norm

    def work(rank):
        for how in ("zero_grad", "scale_loss", "max_grad_norm", None):
            own, whole = params("b"), params("b")
            options = {"max_grad_norm": 1.0} if how == "max_grad_norm" else {}
            opt, one = optimizer(own, **options), optimizer(whole, process_group=alone(rank), **options)
            for named, o, factor in ((own, opt, 1.0 + rank), (whole, one, 1.5)):
                backward(named, o, factor)
                o.step()
                o.zero_grad()
                hears(named, o, how, factor)
            if how is None:
                with pytest.raises(RankError, match="'b' was unfrozen, and its gradient is not averaged .* zero_grad"):
                    nn.utils.clip_grad_norm_(own.values(), 1.0)
            else:
                norms = [clipped_step(named, o, how) for named, o in ((own, opt), (whole, one))]
                assert norms[0] == pytest.approx(norms[1], rel=1e-6)
                assert norms[0] > 1.0
                for name, p in own.items():
                    expected = one.state[whole[name]]["exp_avg"]
                    torch.testing.assert_close(opt.state[p]["exp_avg"].full(), expected, rtol=1e-5, atol=1e-8)
            opt.close()
            one.close()

    run_ranks(2, work)


def test_states_of_frozen_parameters_are_loaded_kept_and_saved_again(tmp_path):
    def content(named, opt):
        return {"model": {name: p.detach() for name, p in named.items()}, "optimizer": opt}

    def work(rank):
        named = params("c")  # which never has a state
        opt = optimizer(named)
        for step in range(2):
            backward(named, opt, 1.0 + step)
            opt.step()
            opt.zero_grad()
        zofftk.save_sharded(content(named, opt), tmp_path / "trained")
        frozen = params("bc")
        other = optimizer(frozen)
        zofftk.load_sharded(content(frozen, other), tmp_path / "trained")
        assert frozen["c"] not in other.state
        zofftk.save_sharded(content(frozen, other), tmp_path / "frozen")
        again = params("c")
        third = optimizer(again)
        zofftk.load_sharded(content(again, third), tmp_path / "frozen")
        frozen["b"].requires_grad_(True)
        other.zero_grad()
        for own, o in ((named, opt), (frozen, other), (again, third)):
            backward(own, o, 0.5)
            o.step()
        for name, p in named.items():
            for own, o in ((frozen, other), (again, third)):
                assert torch.equal(own[name], p), name
                assert (own[name] in o.state) == (name != "c")
                if name != "c":
                    assert o.state[own[name]]["step"] == 3
                    moments = [each.state[q]["exp_avg_sq"].full() for each, q in ((opt, p), (o, own[name]))]
                    assert torch.equal(*moments), name
        for o in (opt, other, third):
            o.close()

    run_ranks(2, work)
