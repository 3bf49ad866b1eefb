"""`DistributedDataParallel` around the model: gradients are averaged over ranks once, by the optimizer, or refused."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zofftk
from tests.rank_processes import run_ranks
from tests.test_ranks import alone, same_on_all_ranks
from zofftk.standin import StandInError

REFUSED = "of 'weight' inside backward, as DistributedDataParallel does to average it .*: hand the model over"
KINDS = [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1}]


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 1))


def train(ddp, opt, rank):
    """With `no_sync()` around the first of two backwards."""
    for step in range(4):
        for micro in range(2):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(4 * step + 2 * micro + rank))
            with contextlib.nullcontext() if micro else ddp.no_sync():
                (ddp(x).square().mean() / 2).backward()
        opt.step()
        opt.zero_grad()


def test_b03_no_sync_and_one_average():
    def work(rank):
        expected = DistributedDataParallel(small())
        train(expected, torch.optim.AdamW(expected.parameters(), lr=0.01), rank)
        for kind in KINDS:
            for is_built_last in (False, True):
                model = small()
                ddp = DistributedDataParallel(model, **kind) if is_built_last else None
                opt = zofftk.OffloadAdamW(model.named_parameters(), lr=0.01)
                ddp = ddp or DistributedDataParallel(model, **kind)
                handed_over = zofftk.offload(ddp, opt)
                train(ddp, opt, rank)
                opt.synchronize()
                for p, q in zip(model.parameters(), expected.module.parameters(), strict=True):
                    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
                    assert opt.state[p]["step"] == 4
                assert same_on_all_ranks(model.parameters())
                handed_over.remove()
                opt.close()
                ddp(torch.full((1, 8), 1.0 + rank)).sum().backward()  # and DDP averages again
                assert same_on_all_ranks([p.grad for p in model.parameters()])

    run_ranks(2, work)


def test_what_would_be_averaged_twice_or_not_at_all_is_refused():
    def work(rank):
        group = alone(rank)
        for kind, comm_hook in (({}, None), ({}, send), ({"static_graph": True}, None)):
            model = nn.Linear(4, 1, bias=False)
            opt = zofftk.OffloadAdamW(model.named_parameters())
            ddp = DistributedDataParallel(model, **kind)
            if comm_hook:
                ddp.register_comm_hook(None, comm_hook)
            with pytest.raises(StandInError, match=REFUSED):
                ddp(torch.ones(1, 4)).sum().backward()
            opt.close()

        opt = zofftk.OffloadAdamW(model.named_parameters())
        with pytest.raises(ValueError, match="has static_graph=True, expected False"):
            zofftk.offload(ddp, opt)
        opt.close()

        opt = zofftk.OffloadAdamW(model.parameters(), process_group=group)
        nested = nn.Sequential(DistributedDataParallel(model))
        with pytest.raises(ValueError, match=rf"is over ranks \[0, 1\], expected .* gradients over, \[{rank}\]"):
            zofftk.offload(nested, opt)
        assert nested[0].require_backward_grad_sync, "nothing has changed"
        zofftk.offload(nn.Sequential(DistributedDataParallel(model, process_group=group)), opt)
        opt.close()

    def send(state, bucket):
        raise AssertionError("the gradients have been read")

    run_ranks(2, work)
