"""`lion_step` and `sgd_step`: the optimizers' own bits, torch's within ulps, and what they refuse."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits, assert_within_ulp
from tests.reference.moment import Lion
from zofftk.cpu_lion import lion_step
from zofftk.cpu_sgd import sgd_step

pytestmark = pytest.mark.usefixtures("no_threads_left")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SGDS = [
    dict(lr=0.1),
    dict(lr=0.1, weight_decay=0.1),
    dict(lr=0.1, momentum=0.9),
    dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
]
LION = dict(lr=3e-3, betas=(0.95, 0.98), weight_decay=0.2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hyper", SGDS)
def test_sgd_has_the_bits_of_the_optimizer(dtype, hyper):
    p = nn.Parameter(torch.randn(5003).to(dtype))
    param = p.detach().float().clone()
    buffer = torch.zeros(5003) if "momentum" in hyper else None
    opt = zofftk.OffloadSGD([p], **hyper, max_grad_norm=2.0)
    for step in range(5):
        p.grad = torch.randn(5003).to(dtype)
        out = p.grad.clone()
        opt.step()
        clip = min(1.0, 2.0 / (opt.last_grad_norm + 1e-6))
        sgd_step(param, buffer, out, **hyper, first=step == 0, grad_scale=clip, out=out)
        assert_same_bits(out, p.detach(), "the parameter")
        assert_same_bits(param, opt.state[p]["master"], "master")
        if buffer is not None:
            assert_same_bits(buffer, opt.state[p]["momentum_buffer"], "momentum_buffer")
        opt.zero_grad()
    opt.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_lion_has_the_bits_of_the_optimizer(dtype):
    p = nn.Parameter(torch.randn(5003).to(dtype))
    param, exp_avg = p.detach().float().clone(), torch.zeros(5003)
    opt = zofftk.OffloadLion([p], **LION, max_grad_norm=2.0)
    for _ in range(5):
        p.grad = torch.randn(5003).to(dtype)
        out = torch.empty_like(p.grad)
        grad = p.grad.clone()
        opt.step()
        lion_step(param, exp_avg, grad, **LION, grad_scale=min(1.0, 2.0 / (opt.last_grad_norm + 1e-6)), out=out)
        assert_same_bits(out, p.detach(), "the parameter")
        assert_same_bits(param, opt.state[p]["master"], "master")
        assert_same_bits(exp_avg, opt.state[p]["exp_avg"], "exp_avg")
        opt.zero_grad()
    opt.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hyper", SGDS)
def test_sgd_is_torchs_within_two_ulps(dtype, hyper):
    """From equal states; ulp of the larger of the old value and the terms added to it."""
    p = nn.Parameter(torch.randn(5003))
    opt = torch.optim.SGD([p], **hyper)
    has_buffer = "momentum" in hyper
    for step in range(6):
        grad = torch.randn(5003).to(dtype)
        param = p.detach().clone()
        buffer = opt.state[p]["momentum_buffer"].clone() if has_buffer and step else torch.full((5003,), float("nan"))
        before, old_buffer = param.clone(), torch.zeros(5003) if step == 0 else buffer.clone()
        sgd_step(param, buffer if has_buffer else None, grad, **hyper, first=step == 0)
        p.grad = grad.float()
        opt.step()
        terms = grad.float().abs() + 0.1 * before.abs()
        if has_buffer:
            assert_within_ulp(buffer, opt.state[p]["momentum_buffer"], torch.maximum(old_buffer.abs(), terms), 2)
            terms = terms + buffer.abs()
        size = torch.maximum(before.abs(), (p.detach() - before).abs() + 0.1 * terms)
        assert_within_ulp(param, p.detach(), size, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lion_is_the_plain_one(dtype):
    p = nn.Parameter(torch.randn(5003))
    param, exp_avg = p.detach().clone(), torch.zeros(5003)
    opt = Lion([p], **LION)
    for _ in range(20):
        grad = torch.randn(5003).to(dtype)
        p.grad = grad.float()
        opt.step()
        lion_step(param, exp_avg, grad, **LION)
        assert_same_bits(param, p.detach())
        assert_same_bits(exp_avg, opt.state[p]["exp_avg"])


def test_by_hand():
    param, exp_avg, out = torch.ones(3), torch.zeros(3), torch.empty(3, dtype=torch.bfloat16)
    lion_step(param, exp_avg, torch.tensor([2.0, -0.5, 0.0]), lr=0.25, betas=(0.5, 0.75), weight_decay=1.0, out=out)
    assert param.tolist() == out.tolist() == [0.5, 1.0, 0.75]
    assert exp_avg.tolist() == [0.5, -0.125, 0.0]
    param, buffer = torch.ones(2), torch.full((2,), 7.0)
    sgd_step(param, buffer, torch.tensor([1.0, 2.0]), lr=0.5, momentum=0.5, dampening=0.5, first=True)
    assert (param.tolist(), buffer.tolist()) == ([0.5, 0.0], [1.0, 2.0])
    sgd_step(param, buffer, torch.tensor([1.0, 2.0]), lr=0.5, momentum=0.5, dampening=0.5, grad_scale=2.0)
    assert (param.tolist(), buffer.tolist()) == ([-0.25, -1.5], [1.5, 3.0])
    sgd_step(torch.empty(0), None, torch.empty(0), lr=1.0)
    lion_step(torch.empty(0, 3), torch.empty(0), torch.empty(0), lr=1.0)


def test_autograd_notices_the_change():
    param = torch.ones(3, requires_grad=True)
    for step in (
        lambda data: lion_step(data, torch.zeros(3), torch.ones(3), lr=0.1),
        lambda data: sgd_step(data, None, torch.ones(3), lr=0.1),
    ):
        loss = param.square().sum()
        step(param.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def lion(**change):
    tensors = dict(param=torch.ones(8), exp_avg=torch.zeros(8), grad=torch.ones(8))
    lion_step(**{**tensors, "lr": 0.1, **change})


def sgd(**change):
    tensors = dict(param=torch.ones(8), momentum_buffer=torch.zeros(8), grad=torch.ones(8))
    sgd_step(**{**tensors, "lr": 0.1, "momentum": 0.9, **change})


BAD = [
    (both, *rest)
    for both, rest in itertools.product(
        (lion, sgd),
        [
            (dict(param=[1.0] * 8), TypeError, "param: expected a torch.Tensor, got list"),
            (dict(param=torch.ones(8).half()), TypeError, "param: expected dtype torch.float32, got torch.float16"),
            (dict(grad=torch.ones(8, dtype=torch.int32)), TypeError, "grad: expected dtype torch.float32 or"),
            (
                dict(grad=torch.ones(8, device="meta")),
                ValueError,
                "grad: expected a tensor on device cpu, got device m",
            ),
            (dict(grad=torch.ones(9)), ValueError, "grad: expected 8 elements as in param, got 9"),
            (dict(out=torch.ones(16)[::2]), ValueError, "out: expected a contiguous tensor"),
            (dict(lr=-1.0), ValueError, "lr: expected 0 or more, got -1.0"),
            (dict(lr="fast"), TypeError, "lr: expected a number, got 'fast'"),
            (dict(weight_decay=float("nan")), ValueError, "weight_decay: expected 0 or more, got nan"),
            (dict(grad_scale=None), TypeError, "grad_scale: expected a number, got None"),
            (dict(threads=0), ValueError, "threads: expected 1 or more, got 0"),
        ],
    )
]
BAD += [
    (lion, dict(exp_avg=torch.zeros(7)), ValueError, "exp_avg: expected 8 elements as in param, got 7"),
    (lion, dict(betas=(0.9, 1.0)), ValueError, r"betas\[1\]: expected 0 <= beta < 1, got 1.0"),
    (lion, dict(betas=0.9), ValueError, "betas: expected two numbers, got 0.9"),
    (sgd, dict(momentum_buffer=None), TypeError, "momentum_buffer: expected a torch.Tensor, got NoneType"),
    (sgd, dict(momentum=0.0), ValueError, "momentum_buffer: expected None where momentum is 0, got a buffer"),
    (sgd, dict(momentum=-0.1), ValueError, "momentum: expected 0 or more, got -0.1"),
    (sgd, dict(dampening="none"), TypeError, "dampening: expected a number, got 'none'"),
    (sgd, dict(nesterov=True, dampening=0.5), ValueError, "nesterov: expected momentum above 0 and dampening 0"),
]


@pytest.mark.parametrize(("step", "change", "error", "message"), BAD, ids=[f"{b[0].__name__} {b[3][:30]}" for b in BAD])
def test_bad_arguments_are_named(step, change, error, message):
    with pytest.raises(error, match=message):
        step(**change)


@pytest.mark.parametrize("step", [lion, sgd])
def test_overlapping_buffers_are_refused(step):
    base = torch.zeros(12)
    state = "exp_avg" if step is lion else "momentum_buffer"
    for first, second in itertools.combinations(("param", state, "grad", "out"), 2):
        with pytest.raises(ValueError, match="expected buffers that do not overlap"):
            step(**{first: base[:8], second: base[4:]})
    assert not base.any()
