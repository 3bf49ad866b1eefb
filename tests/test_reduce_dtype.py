"""The dtype in which gradients are summed over ranks, against sums in float64."""

from __future__ import annotations

import itertools

import torch
from torch import nn

import zofftk
from tests.rank_processes import run_ranks
from zofftk.device.emulated import EmulatedDevice

SIZE, NUMEL = 3, 9001


def gradients(dtype):
    """Of each rank, as the wire has them."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(NUMEL, generator=generator).to(dtype).float() for _ in range(SIZE)]


def errors(rank, wire, reduce_dtype, param_dtype):
    """Of the mean, against float64: relative to the mean, and to the mean size of its terms."""
    grads = gradients(wire)
    p = nn.Parameter(torch.zeros(NUMEL, dtype=param_dtype))
    opt = zofftk.OffloadAdamW(
        [p],
        wire_dtype=wire,
        reduce_dtype=reduce_dtype,
        bucket_bytes=16 * 1024,
        device=EmulatedDevice(delays=rank, poison=True),
    )
    p.grad = grads[rank].to(param_dtype)
    mean = sum(g.double() for g in grads) / SIZE
    got = _after_step(opt, p)
    opt.close()
    error = (got.double() - mean).abs()
    size = sum(g.double().abs() for g in grads) / SIZE
    return (
        (error - mean.abs() * torch.finfo(wire).eps / 2).max().item(),
        (error / size).max().item(),
        error.sum().item(),
    )


def _after_step(opt, p):
    """The first moment of a first step is a tenth of the gradient."""
    opt.step()
    return opt.state[p]["exp_avg"].full() / (1 - 0.9)


def test_sums_are_within_their_bounds_and_wide_ones_are_better():
    def work(rank):
        for wire, param in itertools.product((torch.bfloat16, torch.float16), (torch.float32, None)):
            _, narrow, narrow_total = errors(rank, wire, None, param or wire)
            above_rounding, wide, wide_total = errors(rank, wire, torch.float32, param or wire)
            unit = torch.finfo(wire).eps / 2
            assert narrow <= SIZE * unit * 1.01  # a rounding for each term
            assert above_rounding <= 3e-7  # one rounding, and those of fp32
            assert wide <= narrow
            assert wide_total < 0.8 * narrow_total

    run_ranks(SIZE, work)


def test_what_fp16_cannot_add_up_is_averaged():
    def work(rank):
        for reduce_dtype in (None, torch.float32):
            p = nn.Parameter(torch.zeros(100, dtype=torch.float16))
            opt = zofftk.OffloadAdamW([p], reduce_dtype=reduce_dtype)
            p.grad = torch.full_like(p, 40000.0)
            opt.step()
            assert not opt.last_step_skipped
            assert opt.last_grad_norm == 400_000.0
            opt.close()

    run_ranks(2, work)


def test_only_the_slots_grow():
    def work(rank):
        reports = []
        for reduce_dtype in (None, torch.float32):
            p = nn.Parameter(torch.ones(9000, dtype=torch.bfloat16))
            opt = zofftk.OffloadAdamW([p], reduce_dtype=reduce_dtype)
            for _ in range(2):
                p.sum().backward()
                opt.step()
                opt.zero_grad()
            reports.append(opt.report())
            opt.close()
        narrow, wide = reports
        assert (narrow.host_bytes, narrow.bytes_down, narrow.bytes_up) == (
            wide.host_bytes,
            wide.bytes_down,
            wide.bytes_up,
        )
        assert 1.9 * narrow.staging_bytes < wide.staging_bytes <= 2 * narrow.staging_bytes

    run_ranks(2, work)
