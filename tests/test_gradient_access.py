"""Reading and writing the gradient that has left: `opt.grad`, `opt.set_grad`, and gradients of more precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from zofftk import LossScale

pytestmark = pytest.mark.usefixtures("no_threads_left")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def offload(*params, **options):
    return zofftk.OffloadAdamW(params, **{"lr": 0.1, "weight_decay": 0.0, **options})


def param(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, LossScale(initial=1024.0)])
def test_b19_read_and_write_the_gradient(dtype, scale):
    a, b = param(1.0, dtype=dtype), param(1.0, dtype=dtype)
    opt = offload(a, b, loss_scale=scale)
    assert opt.grad(a) is None
    opt.scale_loss((3 * a.float() + 4 * b.float()).sum()).backward()
    assert [opt.grad(p).tolist() for p in (a, b)] == [[3.0], [4.0]]
    assert opt.grad(a).dtype == torch.float32
    assert torch.nn.utils.get_total_norm([p.grad for p in (a, b)]).item() == 5.0
    for p in (a, b):
        opt.set_grad(p, opt.grad(p) * 0.5)
    assert [opt.grad(p).tolist() for p in (a, b)] == [[1.5], [2.0]]
    assert [p.grad.norm().item() for p in (a, b)] == [1.5, 2.0]
    opt.step()
    assert opt.last_grad_norm == 2.5
    assert [opt.state[p]["exp_avg"].item() for p in (a, b)] == pytest.approx([0.15, 0.2])
    opt.close()


def test_a_written_gradient_is_the_optimizers_own():
    a = param(1.0, 2.0)
    opt = offload(a)
    grad = torch.ones(2)
    opt.set_grad(a, grad)
    grad.fill_(7.0)
    assert opt.grad(a).tolist() == [1.0, 1.0]
    (3 * a).sum().backward()  # comes on top
    assert opt.grad(a).tolist() == [4.0, 4.0]
    opt.set_grad(a, torch.zeros(2))
    opt.step()
    assert opt.state[a]["exp_avg"].tolist() == [0.0, 0.0]
    opt.close()


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (torch.ones(3), r"set_grad\(\) expects a gradient of shape \(2,\), got \(3,\)"),
        (torch.ones(2).to_sparse(), "is torch.sparse_coo, expected a dense one"),
        (torch.ones(2, dtype=torch.int32), "is torch.int32, expected real floating-point numbers"),
    ],
)
def test_what_is_no_gradient(grad, message):
    a = param(1.0, 1.0)
    opt = offload(a)
    with pytest.raises((ValueError, TypeError), match=message):
        opt.set_grad(a, grad)
    with pytest.raises(ValueError, match=r"set_grad\(\) expects a trainable parameter of this optimizer"):
        opt.set_grad(param(1.0), torch.ones(1))
    assert a.grad is None
    opt.close()


# -- gradients of another dtype than the parameter's ---------------------------------------------------------------

FINE = 1.0 + 2.0**-12  # is 1.0 in bf16, and in fp16 rounds to 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["set_grad", "p.grad", "backward"])
def test_b57_an_fp32_gradient_of_a_16_bit_parameter_keeps_its_bits(dtype, by):
    p = param(1.0, dtype=dtype)
    if by != "set_grad" and not hasattr(p, "grad_dtype"):
        pytest.skip("this torch has only gradients of the parameter's dtype")
    opt = offload(p)
    if by == "set_grad":
        opt.set_grad(p, torch.tensor([FINE]))
    else:
        p.grad_dtype = None
        if by == "p.grad":
            p.grad = torch.tensor([FINE])
        else:
            opt.close()
            opt = offload(p)
            p.grad_dtype = None

            class Fine(torch.autograd.Function):
                @staticmethod
                def forward(ctx, p):
                    return p.float() * 1

                @staticmethod
                def backward(ctx, grad):
                    return grad

            (Fine.apply(p) * FINE).sum().backward()
    opt.step()
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.1 * FINE, rel=1e-7)
    assert opt.last_grad_norm == FINE
    opt.close()


def test_b57_other_pairs():
    expected = torch.optim.AdamW([q := param(1.0, -2.0)], lr=0.1, weight_decay=0.0)
    q.grad = torch.tensor([0.5, 3.0])
    expected.step()
    for dtype in DTYPES:
        for grad_dtype in [*DTYPES, torch.float64]:
            p = param(1.0, -2.0, dtype=dtype)
            opt = offload(p)
            opt.set_grad(p, torch.tensor([0.5, 3.0], dtype=grad_dtype))
            opt.step()
            torch.testing.assert_close(opt.state[p]["master"], q.detach(), rtol=1e-6, atol=1e-7)
            assert_same_bits(p.detach(), opt.state[p]["master"].to(dtype))
            opt.close()


@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_fine_and_coarse_gradients_of_one_bucket_add_up(micro, factor):
    fine, coarse = param(1.0, 1.0, dtype=torch.bfloat16), param(1.0, dtype=torch.bfloat16)
    opt = offload(fine, coarse)
    for _ in range(micro):
        (fine.float().sum() + 2 * coarse.float()).sum().backward()
    opt.set_grad(fine, torch.full((2,), FINE))
    for p in (fine, coarse):
        p.grad.mul_(factor)
    fine.grad.add_(torch.full((2,), 2.0**-12))
    coarse.grad.add_(torch.ones(1, dtype=torch.bfloat16))
    assert opt.grad(fine).tolist() == [FINE * factor + 2.0**-12] * 2
    assert opt.grad(coarse).tolist() == [2.0 * micro * factor + 1]
    norm = (2 * (FINE * factor + 2.0**-12) ** 2 + (2.0 * micro * factor + 1) ** 2) ** 0.5
    opt.step()
    assert opt.last_grad_norm == pytest.approx(norm, rel=1e-12)
    opt.close()


def test_a_narrow_wire_that_was_asked_for_rounds():
    p = param(1.0)
    opt = offload(p, wire_dtype=torch.bfloat16)
    opt.set_grad(p, torch.tensor([FINE]))
    assert opt.grad(p).tolist() == [1.0]
    opt.close()
