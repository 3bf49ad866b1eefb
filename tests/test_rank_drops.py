"""Gradients that are dropped: on all ranks alike they leave nothing behind, on some of them alone it is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.rank_processes import run_ranks
from tests.test_ranks import alone, optimizer
from zofftk.errors import RankError

SIZE = 30  # of a layer without bias: some to a bucket


def layers():
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(5))


def backward(model, order, factor):
    """The first of `order` is the last that has its gradient."""
    x = torch.full((1, SIZE), factor)
    sum(torch.tanh(model[number](x)).sum() for number in order).backward()


def zeros(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


# What each of the two ranks does before both have another backward and go on: b, a backward; m, model.zero_grad();
# o, optimizer.zero_grad(); z, zeros in every p.grad; n, no other backward.
UNLIKE = [
    ("bm", ""),
    ("bo", ""),
    ("bo", "o"),
    ("bm", "b"),
    ("bm", "bo"),
    ("bz", ""),
    ("bz", "b"),
    ("bm", "bbm"),
    ("bmbm", "bm"),
    ("bm", "bn"),
    ("bmn", "b"),
    ("bmn", "bn"),
]
ALIKE = [("bm", "bm"), ("bo", "bo"), ("bmbm", "bmbm"), ("bbm", "bbm"), ("bz", "bz"), ("bbo", "bo")]


def begin(model, opt, acts, order):
    for act in acts:
        if act == "b":
            backward(model, order, 3.0)
        elif act == "m":
            model.zero_grad()
        elif act == "o":
            opt.zero_grad()
        elif act == "z":
            zeros(model)
    if "n" not in acts:
        backward(model, order, 1.0)


def test_by_some_ranks_alone():
    def go_on(model, opt, acts, clips):
        begin(model, opt, acts, range(4))
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    def work(rank):
        for acts in UNLIKE:
            for clips in (False, True):
                model = layers()
                opt = optimizer(model, rank, bucket_bytes=2 * 4 * SIZE**2)
                before = [opt.show_states()["state"][i]["master"].clone() for i in range(5)]
                with pytest.raises(RankError, match="have parted|has dropped a gradient of '0.weight' that rank"):
                    go_on(model, opt, acts[rank], clips)
                for old, p in zip(before, model.parameters(), strict=True):
                    for part, own in zip(old.parts, opt.state[p]["master"].parts, strict=True):
                        assert torch.equal(part.values, own.values), (acts, clips)
                opt.close()

    run_ranks(2, work)


def test_after_a_norm_or_a_step_that_was_skipped():
    def work(rank):
        model = layers()
        opt = optimizer(model, rank)
        backward(model, range(4), 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(RankError, match="rank 0 drops its gradients where rank 1 makes a step"):
            opt.step() if rank else opt.zero_grad()
        opt.close()

        opt = optimizer(model, rank)
        backward(model, range(4 if rank else 2), float("nan"))
        with pytest.warns(RuntimeWarning, match="a step was skipped"):
            opt.step()
        for _ in range(2):
            opt.zero_grad()
        backward(model, range(4), 1.0)
        opt.step()
        assert not opt.last_step_skipped
        opt.zero_grad()
        backward(model, range(4), float("nan"))
        opt.step()
        with pytest.raises(RankError, match="rank 0 drops its gradients where rank 1 makes a step"):
            opt.step() if rank else opt.zero_grad()
        opt.close()

    run_ranks(2, work)


def test_by_all_ranks_in_buckets_that_are_full_and_not():
    """Each rank uses the layers in an order of its own."""

    def work(rank):
        for acts in ALIKE:
            for used in ((0, 1, 2, 3), (0, 1, 2), (4, 2)):
                model, whole = layers(), layers()
                opt = optimizer(model, rank, bucket_bytes=2 * 4 * SIZE**2)
                one = optimizer(whole, process_group=alone(rank))
                begin(model, opt, acts[rank], used[:: -1 if rank else 1])
                begin(whole, one, acts[rank], used)
                for o in (opt, one):
                    o.step()
                for number in used:  # the first moment shows the size of a gradient, the weight its sign alone
                    moments = [o.state[m[number].weight]["exp_avg"] for m, o in ((model, opt), (whole, one))]
                    assert torch.equal(moments[0].full(), moments[1]), (acts, used)
                for o in (opt, one):
                    o.close()

    run_ranks(2, work)
