"""Ranks of which not all have a gradient of everything, around a step that is skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zofftk
from tests.rank_processes import run_ranks
from tests.test_rank_states import exact_step, params
from tests.test_ranks import HYPER, alone
from zofftk.device.emulated import EmulatedDevice


class Halves(nn.Module):
    """Either of two layers, or both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, uses, factor):
        return sum(layer(torch.full((40,), factor)).sum() for layer in (self.left, self.right)[uses])


BOTH, LEFT, RIGHT = slice(0, 2), slice(0, 1), slice(1, 2)


def backward(sharded, one, rank, uses, factor):
    """`uses` of each rank; `one` gets the mean."""
    sharded(uses[rank], factor).backward()
    (sum(one(use, factor) for use in uses) / len(uses)).backward()


@pytest.mark.filterwarnings("ignore:a step was skipped")
def test_what_a_skipped_step_leaves_can_be_dropped_where_it_never_was():
    """The gradient of `right` is another rank's: after the skip it is dropped, or zeroed, on both."""

    def check(rank, to_none, **options):
        device = EmulatedDevice(delays=rank, poison=True)
        sharded, whole = Halves(), Halves()
        opt = zofftk.OffloadAdamW(sharded.parameters(), bucket_bytes=2048, device=device, **HYPER, **options)
        one = zofftk.OffloadAdamW(whole.parameters(), process_group=alone(rank), **HYPER, **options)
        for uses, factor in (((BOTH, LEFT), float("inf")), ((LEFT, BOTH), 1.0), ((LEFT, RIGHT), 2.0)):
            backward(sharded, whole, rank, uses, factor)
            for o in (opt, one):
                o.step()
            assert opt.last_step_skipped == one.last_step_skipped == (factor == float("inf"))
            assert opt.last_grad_norm == one.last_grad_norm or opt.last_step_skipped
            assert opt.loss_scale == one.loss_scale
            has_grad = [p.grad is not None for p in sharded.parameters()]
            assert has_grad == [p.grad is not None for p in whole.parameters()] or not opt.last_step_skipped
            for model in (sharded, whole):
                model.zero_grad(set_to_none=to_none)
        for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
            assert torch.equal(p, q)
        opt.close()
        one.close()

    def work(rank):
        for to_none in (True, False):
            check(rank, to_none)
            check(rank, to_none, loss_scale=zofftk.LossScale(initial=8.0))

    run_ranks(2, work)


def test_a_late_state_goes_into_an_optimizer_that_is_not_late(tmp_path):
    def work(rank):
        late, plain, follower = params(), params(), params()
        options = {**HYPER, "device": EmulatedDevice(delays=rank)}
        opt = zofftk.OffloadAdamW(late, update="delayed", delay_after=1, **options)
        for step in range(3):
            exact_step(late, opt, step)
        zofftk.save_sharded({"model": {str(i): p.data for i, p in enumerate(late)}, "optimizer": opt}, tmp_path / "run")
        other = zofftk.OffloadAdamW(plain, **{**HYPER, "device": EmulatedDevice(delays=rank)})
        content = {"model": {str(i): p.data for i, p in enumerate(plain)}, "optimizer": other}
        zofftk.load_sharded(content, tmp_path / "run")
        always = zofftk.OffloadAdamW(follower, **{**HYPER, "device": EmulatedDevice(delays=rank)})
        for step in range(3):
            exact_step(follower, always, step)
        for optimizer, own in ((other, plain), (always, follower)):
            exact_step(own, optimizer, 3)
        for p, q in zip(plain, follower, strict=True):
            assert torch.equal(p, q)  # gradients that do not depend on weights: late values change nothing
        for o in (opt, other, always):
            o.close()

    run_ranks(2, work)
