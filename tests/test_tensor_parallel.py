"""Tensor parallelism, with and without data parallelism beside it, against one rank with everything."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import zofftk
from tests.parallel_model import backward, build, mesh_of_sizes, of_each_rank, same_everywhere, train, uncut, whole
from tests.rank_processes import run_ranks
from zofftk.device.emulated import EmulatedDevice

HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1, "bucket_bytes": 4096}


def alone():
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def optimizer(model, **options):
    device = EmulatedDevice(delays=dist.get_rank(), poison=True)
    return zofftk.OffloadAdamW(model.named_parameters(), **{"device": device, **HYPER, **options})


OPTIONS = [  # of the optimizer, micro-batches, steps
    ({"max_grad_norm": 0.5}, 1, 20),
    ({"max_grad_norm": 0.5, "loss_scale": 8.0}, 2, 4),
    ({"update": "delayed", "delay_after": 2}, 1, 6),
    ({"update": "delayed", "delay_after": 1, "backwards_per_step": 1, "staging_slots": 2, "bucket_bytes": 1}, 1, 5),
]


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 2)])
def test_equals_one_rank(data, tensor):
    def work(rank):
        mesh = mesh_of_sizes(data, tensor)
        for number, (options, micro, steps) in enumerate(OPTIONS):
            model, single = build(mesh=mesh["tp"]), build()
            opt, one = optimizer(model, **options), optimizer(single, process_group=alone(), **options)
            if number % 2:
                zofftk.offload(model, opt)
            losses = train(model, opt, steps, mesh, micro)
            assert losses == pytest.approx(train(single, one, steps, None, micro), rel=1e-5)
            assert opt.last_grad_norm == pytest.approx(one.last_grad_norm, rel=1e-5)
            assert len(set(of_each_rank(opt.last_grad_norm))) == 1
            for o in (opt, one):
                o.flush()
            for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(whole(p), q.detach(), rtol=0, atol=2e-4, msg=name)
            assert len(uncut(model)) == 9
            assert same_everywhere(uncut(model))
            for o in (opt, one):
                o.close()

    run_ranks(data * tensor, work)


def test_the_norm_is_that_of_the_whole_model_and_clips_alike():
    def work(rank):
        mesh = mesh_of_sizes(1, 2)
        model, single = build(mesh=mesh["tp"]), build()
        opt, one = optimizer(model), optimizer(single, process_group=alone())
        for step in range(3):
            for m, o in ((model, opt), (single, one)):
                backward(m, o, step)
            norms = [p.grad.norm().item() for p in model.parameters()]
            assert norms == pytest.approx([p.grad.norm().item() for p in single.parameters()], rel=1e-5)
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            expected = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.1)
            assert total.item() == pytest.approx(expected.item(), rel=1e-5)
            assert total > 0.1
            assert of_each_rank(norms) == [norms] * 2
            for o in (opt, one):
                o.step()
                o.zero_grad()
            assert opt.last_grad_norm == pytest.approx(0.1, rel=1e-4)
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=0, atol=2e-4)
        for o in (opt, one):
            o.close()

    run_ranks(2, work)


def test_half_precision_and_an_overflow_on_one_rank_which_all_skip():
    def work(rank):
        mesh = mesh_of_sizes(1, 2)
        for dtype in (torch.bfloat16, torch.float16):
            model, single = build(dtype, mesh["tp"]), build(dtype)
            scale = zofftk.LossScale(initial=2.0**10, growth_interval=2)
            opt = optimizer(model, loss_scale=scale)
            one = optimizer(single, process_group=alone(), loss_scale=scale)
            assert train(model, opt, 6, mesh) == pytest.approx(train(single, one, 6), rel=2e-2)
            before = [whole(p).clone() for p in model.parameters()]
            backward(model, opt, 7)
            for p in (model.blocks[0].up.weight, model.norm.weight, model.temperature):
                grad = opt.grad(p)
                if rank == 1:
                    getattr(grad, "_local_tensor", grad)[:1] = math.inf
                opt.set_grad(p, grad)
                opt.step()
                opt.zero_grad()
                assert opt.last_step_skipped
                assert set(of_each_rank((opt.skipped_steps, opt.loss_scale))) == {(opt.skipped_steps, opt.loss_scale)}
                backward(model, opt, 7)
            assert opt.skipped_steps == 3
            for p, q in zip(model.parameters(), before, strict=True):
                assert torch.equal(whole(p), q)
            assert same_everywhere(uncut(model))
            for o in (opt, one):
                o.close()

    run_ranks(2, work)
