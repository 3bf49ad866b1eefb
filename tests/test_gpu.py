"""The engine on a CUDA GPU: the emulated device's bits, its own bytes, and no race that a busy card could show."""

from __future__ import annotations

import pytest
import torch

import zofftk
from tests.compare import assert_same_bits
from zofftk.device.emulated import EmulatedDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SHAPES = [(1024, 512), (512,), (3, 5, 7), (), (0, 4), (40_000,), (512, 2048), (33,)]
STEPS = 4


def record_gradients(dtype):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(STEPS)]


def run(gradients, where, dtype, *, hand_over=False, busy=False, **options):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    params = torch.nn.ParameterList(torch.nn.Parameter(value.to(where)) for value in values)
    opt = zofftk.OffloadAdamW(params, lr=1e-2, max_grad_norm=1.0, bucket_bytes=64 * 1024, **options)
    side = torch.cuda.Stream() if busy else None
    for grads in gradients:
        loss = sum((p * g.to(where)).sum() for p, g in zip(params, grads, strict=True))
        if side is not None:
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
        loss.backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    states = [opt.state[p] for p in params]
    opt.close()
    return [p.detach().cpu() for p in params], states


def assert_same(actual, expected):
    for p, q in zip(actual[0], expected[0], strict=True):
        assert_same_bits(p, q)
    for s, t in zip(actual[1], expected[1], strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert_same_bits(s[name], t[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_emulated_devices_bits(dtype):
    gradients = record_gradients(dtype)
    expected = run(gradients, "cpu", dtype, device=EmulatedDevice(poison=True))
    assert_same(run(gradients, "cuda", dtype), expected)


def test_the_same_bits_on_a_busy_card():
    gradients = record_gradients(torch.bfloat16)
    expected = run(gradients, "cpu", torch.bfloat16)
    for _ in range(50):
        assert_same(run(gradients, "cuda", torch.bfloat16, busy=True, staging_slots=2), expected)


def test_device_bytes_are_those_of_the_parameters_and_the_slots():
    params = [torch.nn.Parameter(torch.randn(1 << 22, device="cuda").bfloat16()) for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt = zofftk.OffloadAdamW(params, bucket_bytes=1 << 22)
    for _ in range(3):
        for p in params:
            (p * 2).sum().backward()
        opt.step()
        opt.zero_grad()
    staging = opt.report().staging_bytes
    gradient = params[0].numel() * 2
    # The slots, a product and a gradient of one parameter, and small change of the allocator.
    assert torch.cuda.max_memory_allocated() - before <= staging + 3 * gradient + (8 << 20)
    assert torch.cuda.memory_allocated() - before <= staging + (8 << 20)
    pinned = opt._engine.device.pinned
    assert pinned.refused_bytes == 0
    assert pinned.registered_bytes == 2 * sum(p.numel() for p in params) + 8 * sum(p.numel() // 4096 for p in params)
    opt.close()


def test_a_write_in_the_middle_of_a_backward_is_torchs_own_error():
    p = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
    opt = zofftk.OffloadAdamW([p])
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    opt.close()


def test_forward_overlap_has_the_same_bits():
    def train(hand_over):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(6))).cuda().bfloat16()
        opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-3, bucket_bytes=1 << 18, max_grad_norm=1.0)
        if hand_over:
            zofftk.offload(model, opt)
        for step in range(5):
            x = torch.full((32, 512), 0.01 * (step + 1), device="cuda", dtype=torch.bfloat16)
            model(x).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        weights = [p.detach().cpu() for p in model.parameters()]
        opt.close()
        return weights

    for p, q in zip(train(True), train(False), strict=True):
        assert_same_bits(p, q)
