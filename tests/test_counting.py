"""The same engine without data: fake tensors, one thread, operations and bytes counted."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import zofftk
from tests.small_gpt import SmallGPT, loss_of
from zofftk.device.counting import CountingDevice


@contextmanager
def fake_bfloat16():
    """Models built here are bf16 and hold no memory."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def train(model, vocab, steps, **options):
    device = CountingDevice()
    opt = zofftk.OffloadAdamW(model.parameters(), device=device, **options)
    allocated = dict(device.allocated_bytes)
    device.operations.clear()
    for step in range(steps):
        loss_of(model, step, vocab).backward()
        opt.step()
        opt.zero_grad()
    return opt, device, allocated


def test_a_model_that_fits_no_memory_here():
    with fake_bfloat16():
        model = SmallGPT(vocab=50257, hidden=12288, layers=4, heads=96, seq=64)
        threads = threading.active_count()
        opt, device, allocated = train(model, 50257, steps=2, bucket_bytes=1 << 28, max_grad_norm=1.0)
        assert threading.active_count() == threads
        report = opt.report()
    n = sum(p.numel() for p in model.parameters())
    assert n > 7.8e9
    assert report.num_params == n
    assert device.bytes_up == pytest.approx(2 * 2 * n, rel=1e-3)
    assert device.bytes_down == pytest.approx(2 * 2 * n, rel=2e-3)
    assert allocated["host"] == pytest.approx(14 * n, rel=1e-3)
    assert allocated["device"] < 3 * (1 << 28) * 1.01


def test_its_operations_are_those_of_real_memory():
    with fake_bfloat16():
        opt, device, _ = train(SmallGPT(), 211, steps=3, bucket_bytes=16 * 1024)
        buckets = len(opt._engine.buckets)
    assert buckets > 4
    assert device.operations["pack"] == 3 * buckets
    assert device.operations["down"] == 2 * 3 * buckets  # the gradients and their statistics
    assert device.operations["up"] == device.operations["copy back"] == 3 * buckets
    assert device.operations["host"] == 3 * (buckets + 1)  # Adam, and one norm a step
