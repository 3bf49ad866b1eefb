"""Many ranks: each with a shard of every bucket, on gloo, against one rank with everything."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zofftk
from tests.rank_processes import run_ranks
from zofftk.device.emulated import EmulatedDevice
from zofftk.errors import RankError

HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = [(64, 300), (300, 300), (300, 8)]
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(12, 64, generator=generator), torch.randn(12, 8, generator=generator)


def optimizer(model, rank=0, **options):
    options = {"bucket_bytes": 64 * 1024, "device": EmulatedDevice(delays=rank, poison=True), **HYPER, **options}
    return zofftk.OffloadAdamW(model.named_parameters(), **options)


def alone(rank):
    """A group that shares with nobody."""
    return dist.new_group([rank], use_local_synchronization=True)


def train(model, opt, steps, size, rank, micro=1):
    """Losses over all ranks."""
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for part in range(micro):
            x, y = (t.chunk(size)[rank] for t in batch(step * micro + part))
            loss = F.mse_loss(model(x.to(model[0].weight.dtype)).float(), y) / micro
            loss.backward()
            total += loss.detach()
        if size > 1:
            dist.all_reduce(total)
        opt.step()
        opt.zero_grad()
        losses.append(total.item() / size)
    return losses


def same_on_all_ranks(values):
    flat = torch.cat([value.detach().reshape(-1).view(torch.uint8) for value in values])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return all(torch.equal(other, flat) for other in others)


OPTIONS = [
    {},
    {"max_grad_norm": 0.5},
    {"update": "delayed", "delay_after": 2, "max_grad_norm": 0.5},
    {"staging_slots": 1, "bucket_bytes": 1},
]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_one_rank_on_the_merged_batch(size):
    def work(rank):
        results = []
        for options in OPTIONS:
            for micro in (1, 2):
                model, whole = mlp(), mlp()
                opt, one = optimizer(model, rank, **options), optimizer(whole, process_group=alone(rank), **options)
                losses = train(model, opt, 8, size, rank, micro)
                expected = train(whole, one, 8, 1, 0, micro)
                opt.flush()
                one.flush()
                assert losses == pytest.approx(expected, rel=1e-5)
                assert opt.last_grad_norm == pytest.approx(one.last_grad_norm, rel=1e-5)
                for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                    torch.testing.assert_close(p, q, rtol=0, atol=3e-4)
                assert same_on_all_ranks(model.parameters())
                report, whole_report = opt.report(), one.report()
                results.append((report.bytes_down, report.bytes_up, whole_report.bytes_down, whole_report.bytes_up))
                opt.close()
                one.close()
        return results

    for of_ranks in zip(*run_ranks(size, work), strict=True):
        for place in (0, 1):  # down, up
            moved, alone_moved = sum(moved[place] for moved in of_ranks), of_ranks[0][2 + place]
            # Beside the same bytes: the padding of shards, and norms, which every rank hears of all blocks.
            assert alone_moved <= moved <= 1.06 * alone_moved


def test_with_exact_sums_the_bits_are_those_of_one_rank():
    """Gradients whose sums are exact: what is left are the same operations in the same order."""

    def work(rank):
        for dtype, reduce_dtype in itertools.product(
            (torch.float32, torch.bfloat16, torch.float16), (None, torch.float32)
        ):
            torch.manual_seed(0)
            layers, twins = (
                nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (9000, 5, 20_000, 0, 1)) for _ in "ab"
            )
            layers, twins = layers.to(dtype), twins.to(dtype)
            for p, q in zip(layers, twins, strict=True):
                q.data.copy_(p.data)
            opt = optimizer(layers, rank, max_grad_norm=30.0, reduce_dtype=reduce_dtype)
            one = optimizer(twins, process_group=alone(rank), max_grad_norm=30.0)
            for step in range(4):
                for p, q in zip(layers, twins, strict=True):
                    own = (torch.arange(p.numel()) % 5 + rank - step) / 4
                    mean = (torch.arange(p.numel()) % 5 + 0.5 - step) / 4
                    p.grad, q.grad = own.to(dtype), mean.to(dtype)
                opt.step()
                one.step()
                opt.zero_grad()
                one.zero_grad()
                assert opt.last_grad_norm == one.last_grad_norm
            for p, q in zip(layers, twins, strict=True):
                assert torch.equal(p, q)
            opt.close()
            one.close()

    run_ranks(2, work)


def test_the_model_of_the_first_rank_counts():
    def work(rank):
        torch.manual_seed(rank)
        model = nn.Linear(70, 70)
        opt = optimizer(model, rank)
        assert same_on_all_ranks(model.parameters())
        model(torch.ones(1, 70)).sum().backward()
        opt.step()
        assert same_on_all_ranks(model.parameters())
        opt.close()

    run_ranks(2, work)


def test_ranks_that_hold_other_parameters_are_told():
    def work(rank):
        for other in (nn.Linear(4, 5), nn.Linear(4, 4, bias=False), nn.Linear(4, 4).bfloat16()):
            model = nn.Linear(4, 4) if rank == 0 else other
            with pytest.raises(RankError, match="ranks 0 and 1 do not train the same parameters: "):
                optimizer(model)

    run_ranks(2, work)


def test_b18_one_norm_for_all():
    def work(rank):
        params = [nn.Parameter(torch.zeros(4096)) for _ in range(2)]  # one on each rank
        opt = zofftk.OffloadAdamW(params, lr=0.1, bucket_bytes=2 * 4096 * 4)
        for p, value in zip(params, (3.0, 4.0), strict=True):
            opt.set_grad(p, F.one_hot(torch.tensor(7), 4096).float() * value)
        assert torch.nn.utils.clip_grad_norm_(params, 1.0).item() == 5.0
        grads = [opt.grad(p)[7].item() for p in params]
        assert grads == pytest.approx([0.5999999, 0.7999998], abs=1e-7)
        opt.close()

    run_ranks(2, work)


def test_b29_tied_weights(tmp_path):
    def work(rank):
        def build():
            embedding, head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
            head.weight = embedding.weight
            model = nn.Sequential(embedding, head)
            nn.init.ones_(head.weight)
            return model, zofftk.OffloadAdamW(model.named_parameters(), lr=0.1, max_grad_norm=1.0)

        def step(model, opt):
            weight = model[0].weight
            (model[0].weight.sum() * 0.5 + (model[1].weight * 0.5).sum()).backward()
            opt.step()
            opt.zero_grad()
            assert opt.last_grad_norm == 4.0
            assert model[1].weight is model[0].weight is weight
            assert len(opt.state) == 1

        model, opt = build()
        for _ in range(3):
            step(model, opt)
        zofftk.save_sharded({"model": model, "optimizer": opt}, tmp_path / "run")
        again, other = build()
        zofftk.load_sharded({"model": again, "optimizer": other}, tmp_path / "run")
        for m, o in ((model, opt), (again, other)):
            step(m, o)
        assert torch.equal(model[0].weight, again[1].weight)
        for o in (opt, other):
            o.close()

    run_ranks(2, work)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_b63_what_one_rank_cannot_use_is_skipped_by_all(size):
    def work(rank):
        for value in (math.inf, math.nan):
            skips(rank, value)

    def skips(rank, value):
        p = nn.Parameter(torch.ones(9000))
        opt = zofftk.OffloadAdamW([p], lr=0.1, max_grad_norm=1.0, loss_scale=zofftk.LossScale(initial=65536.0))
        for step in range(4):
            factor = value if step == 1 and rank == 1 else 1.0
            (opt.scale_loss((p * (rank + 1)).sum()) * factor).backward()
            opt.step()
            opt.zero_grad()
            assert opt.last_step_skipped == (step == 1)
        assert opt.loss_scale == 32768.0
        assert opt._engine.managed[0].step == 3
        assert same_on_all_ranks([p])
        opt.close()

    run_ranks(size, work)


def test_b82_fewer_elements_than_ranks():
    def work(rank):
        groups = [nn.Parameter(torch.ones(n)) for n in (3, 1, 5)]
        twins = [nn.Parameter(torch.ones(n)) for n in (3, 1, 5)]
        options = {"lr": 0.1, "max_grad_norm": 1.0}
        empty = [{"params": []}, {"params": [nn.Parameter(torch.ones(0))]}]  # on all ranks
        opt = zofftk.OffloadAdamW([*empty, *({"params": [p]} for p in groups)], **options)
        one = zofftk.OffloadAdamW([{"params": [p]} for p in twins], process_group=alone(rank), **options)
        for step in range(3):
            empty[1]["params"][0].grad = torch.ones(0) if step else None
            for o, params in ((opt, groups), (one, twins)):
                sum((p * (i + 1)).sum() for i, p in enumerate(params)).backward()
                o.step()
                o.zero_grad()
            assert opt.last_grad_norm == one.last_grad_norm
        for p, q in zip(groups, twins, strict=True):
            assert torch.equal(p, q)
        held = sum(part.numel() for m in opt._engine.managed for _, part in m.segment.parts("master", m.index))
        total = torch.tensor(held)
        dist.all_reduce(total)
        assert total.item() == 9
        opt.close()
        one.close()

    run_ranks(4, work)


def test_b86_another_order_on_each_rank():
    def work(rank):
        for bucket_bytes in (16, 32):
            in_another_order(rank, bucket_bytes)

    def in_another_order(rank, bucket_bytes):
        a, b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        opt = zofftk.OffloadAdamW([a, b], lr=0.1, betas=(0.9, 0.999), bucket_bytes=bucket_bytes)
        first, second = ((a, (1.0, 3.0)), (b, (10.0, 30.0)))[:: 1 if rank == 0 else -1]
        loss = (second[0] * second[1][rank]).sum()
        ((first[0] * first[1][rank]).sum() + loss).backward()
        assert opt.grad(a).tolist() == [2.0] * 4
        assert opt.grad(b).tolist() == [20.0] * 4
        opt.step()
        opt.close()

    run_ranks(2, work)


def test_a_parameter_that_some_ranks_do_not_use():
    def work(rank):
        torch.manual_seed(0)
        experts = nn.ModuleList(nn.Linear(70, 70, bias=False) for _ in range(4))
        before = [p.detach().clone() for p in experts.parameters()]
        opt = optimizer(experts, rank, max_grad_norm=1.0)
        for step in range(3):
            x = torch.ones(1, 70)
            used = [(rank + step) % 3]  # the last one never
            for micro in range(1 + rank):  # and another number of backwards
                sum(experts[(i + micro) % 3](x).sum() for i in used).backward()
            opt.step()
            opt.zero_grad()
        assert same_on_all_ranks(experts.parameters())
        changed = [not torch.equal(p, q) for p, q in zip(experts.parameters(), before, strict=True)]
        assert changed == [True, True, True, False]
        opt.close()

    run_ranks(2, work)


def test_clip_grad_norm_where_ranks_have_other_gradients_is_refused_on_all():
    def work(rank):
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        opt = optimizer(layers, rank)
        layers[rank](torch.ones(1, 4)).sum().backward()
        with pytest.raises(RankError, match="has a gradient on rank . and none on rank ., which would leave it out"):
            nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        opt.close()

    run_ranks(2, work)


def test_a_rank_that_does_something_else_is_named():
    def work(rank):
        model = mlp()
        opt = optimizer(model, rank)
        model(torch.ones(1, 64)).sum().backward()
        with pytest.raises(RankError, match="rank 0 makes a step where rank 1 asks for a norm"):
            opt.step() if rank == 0 else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.close()

    run_ranks(2, work)


def test_dropped_gradients_leave_nothing_behind():
    def work(rank):
        model, whole = mlp(), mlp()
        opt, one = optimizer(model, rank), optimizer(whole, process_group=alone(rank))
        for drop in (opt.zero_grad, model.zero_grad):
            x, y = (t.chunk(2)[rank] for t in batch(77))
            F.mse_loss(model(x), y).backward()
            drop()
            losses = train(model, opt, 2, 2, rank)
            assert losses == pytest.approx(train(whole, one, 2, 1, 0), rel=1e-5)
        opt.close()
        one.close()

    run_ranks(2, work)


def test_handed_over():
    def work(rank):
        model, whole = mlp(), mlp()
        opt, one = optimizer(model, rank), optimizer(whole, process_group=alone(rank))
        zofftk.offload(model, opt)
        assert train(model, opt, 6, 2, rank) == pytest.approx(train(whole, one, 6, 1, 0), rel=1e-5)
        opt.synchronize()
        assert same_on_all_ranks(model.parameters())
        opt.close()
        one.close()

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("how", "says"),
    [("dies", "rank 2 has died or cannot be reached"), ("hangs", "rank 2 is alive but does not come, it is after")],
)
def test_b10_a_rank_that_is_gone_is_named(how, says):
    timeout_s = 4.0

    def work(rank):
        model = mlp()
        opt = optimizer(model, rank, rank_timeout_s=timeout_s)
        train(model, opt, 3, 3, rank)
        if rank == 2:
            time.sleep(0.0 if how == "dies" else 2 * timeout_s)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankError, match=says):
            train(model, opt, 1, 1, 0)
        assert time.monotonic() - began < timeout_s + 5
        opt.close()

    run_ranks(3, work, killed=(2,))
