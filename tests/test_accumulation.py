"""Several backwards to a step, steps without a gradient, and how many updates a parameter has had."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from tests.programs.models import Breaks

pytestmark = pytest.mark.usefixtures("no_threads_left")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def offload(params, **options):
    return zofftk.OffloadAdamW(params, **{"lr": 0.1, "weight_decay": 0.0, **options})


def param(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def backward(p, gradient):
    (p.float() * gradient).sum().backward()


# -- sums ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hand_over", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_b12_all_micro_gradients_count_in_every_step(dtype, hand_over, mean):
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    opt = offload(model.parameters())
    if hand_over:
        zofftk.offload(model, opt)
    moments = []
    for micros in ((1, 2, 3, 4), (4, 3, 2, 1)):
        for gradient in micros:
            x = torch.tensor([[gradient / (4 if mean else 1)]], dtype=dtype)
            model(x).sum().backward()
        opt.step()
        opt.synchronize()
        moments.append([opt.state[model.weight][name].item() for name in ("exp_avg", "exp_avg_sq")])
        opt.zero_grad()
    factor = 0.25 if mean else 1.0
    assert moments[0] == pytest.approx([1.0 * factor, 0.1 * factor**2] if not mean else [0.25, 0.00625], rel=1e-6)
    assert moments[1] == pytest.approx([1.9 * factor, 0.1999 * factor**2], rel=1e-6)
    opt.close()


def test_b12_the_number_of_backwards_may_change_from_step_to_step():
    p = param(0.0)
    opt = offload([p])
    expected = torch.optim.AdamW([q := param(0.0)], lr=0.1, weight_decay=0.0)
    for micros in ([1.0] * 4, [2.0, 3.0], [5.0], [1.0, 1.0, 1.0]):
        for gradient in micros:
            backward(p, gradient)
            backward(q, gradient)
        for optimizer in (opt, expected):
            optimizer.step()
            optimizer.zero_grad()
        assert opt.state[p]["exp_avg"].item() == pytest.approx(expected.state[q]["exp_avg"].item(), rel=1e-6)
    assert opt.state[p]["step"] == 4
    opt.close()


def test_b20_small_gradients_add_up_in_fp32():
    p = param(1.0, dtype=torch.bfloat16)
    opt = offload([p])
    backward(p, 1.0)
    for _ in range(256):
        backward(p, 2.0**-8)
    assert opt.grad(p).tolist() == [2.0]
    opt.step()
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.2, rel=1e-6)
    opt.close()


def test_the_fp32_sums_cost_memory_only_where_they_are_used():
    p = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    opt = offload([p])
    backward(p, 1.0)
    opt.step()
    opt.zero_grad()
    before = opt.report()
    backward(p, 1.0)
    backward(p, 1.0)
    opt.step()
    after = opt.report()
    assert 4 * p.numel() <= after.host_bytes - before.host_bytes <= 4.1 * p.numel()
    assert after.bytes_up - before.bytes_up == before.bytes_up == 2 * p.numel()  # no sum goes back up
    opt.close()


@pytest.mark.parametrize("before", [0, 1])
def test_a_failed_backward_and_a_retry_leave_no_trace(before):
    def train(failures):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        opt = offload(model.parameters(), bucket_bytes=1, max_grad_norm=0.1)
        x = torch.ones(2, 8)
        for step in range(4):
            if step in failures:
                for _ in range(before):
                    model(x).sum().backward()
                with pytest.raises(ArithmeticError):
                    model[2](model[1](Breaks.apply(model[0](x)))).square().sum().backward()
                opt.zero_grad()
            model(x * (step + 1)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        opt.close()
        return model, opt

    (model, opt), (other, plain) = train({0, 2}), train(set())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())
        assert_same_bits(opt.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"])


# -- steps without a gradient --------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b53_a_parameter_without_a_gradient_stays_as_it_is(set_to_none, dtype):
    a, b = param(1.0, dtype=dtype), param(1.0, dtype=dtype)
    masters = [param(1.0), param(1.0)]
    opt = offload([a, b], weight_decay=0.1)
    expected = torch.optim.AdamW(masters, lr=0.1, weight_decay=0.1)
    for used in ((True, True), (True, False), (True, True)):
        opt.zero_grad(set_to_none=set_to_none)
        expected.zero_grad(set_to_none=set_to_none)
        before = b.detach().clone()
        for p, q, is_used in zip((a, b), masters, used, strict=True):
            if is_used:
                backward(p, 1.0)
                backward(q, 1.0)
        opt.step()
        expected.step()
        if not used[1] and set_to_none:
            assert_same_bits(b.detach(), before)
    for p, q in zip((a, b), masters, strict=True):
        torch.testing.assert_close(opt.state[p]["master"], q.detach(), rtol=1e-6, atol=1e-7)
        assert opt.state[p]["step"] == expected.state[q]["step"]
    assert opt.state[b]["step"] == (2 if set_to_none else 3)
    opt.close()


def test_b48_a_parameter_that_never_gets_a_gradient():
    a, b = param(3.0, 4.0), param(1.0)
    opt = offload([a, b], weight_decay=0.1, max_grad_norm=1.0)
    for _ in range(3):
        opt.zero_grad()
        for _ in range(2):
            (a * a.detach() / a.detach()).sum().backward()
        opt.step()
        assert opt.last_grad_norm == pytest.approx(8**0.5)
    assert b.item() == 1.0
    assert b not in opt.state
    twin = offload([c := param(0.0, 0.0), d := param(1.0)])
    twin.load_state_dict(opt.state_dict())
    assert twin.state[c]["step"] == 3
    assert d not in twin.state
    for each in (opt, twin):
        each.close()


def test_b45_a_scaler_in_an_iteration_without_gradients():
    p = param(1.0, dtype=torch.float16)
    opt = offload([p])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(p.float().sum()).backward()  # (a) the hooks have taken p.grad
    scaler.step(opt)
    scaler.update()
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.1)
    opt.zero_grad()
    opt.step()  # (b) nothing has a gradient
    assert opt.state[p]["step"] == 1
    scaler.scale(p.float().sum()).backward()  # (c) unscaled, and then the user skips the step
    scaler.unscale_(opt)
    scaler.update()
    opt.zero_grad()
    scaler.scale(p.float().sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert opt.state[p]["step"] == 2
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.19)
    opt.close()


# -- counting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ["tensor", "int", "bf16"])
def test_b56_the_step_count_does_not_stop(dtype, stored):
    start = {"tensor": torch.tensor(255.0), "int": 255, "bf16": torch.tensor(256.0, dtype=torch.bfloat16)}[stored]
    p, q = param(1.0, dtype=dtype), param(1.0)
    opt = offload([p], betas=(0.9, 0.999), lr=1e-3)
    expected = torch.optim.AdamW([q], lr=1e-3, weight_decay=0.0)
    moments = {"exp_avg": torch.tensor([0.5]), "exp_avg_sq": torch.tensor([0.25])}
    opt.load_state_dict(
        {"state": {0: {"step": start, **moments}}, "param_groups": [{**opt.state_dict()["param_groups"][0]}]}
    )
    expected.load_state_dict(
        {
            "state": {0: {"step": torch.tensor(float(start)), **moments}},
            "param_groups": expected.state_dict()["param_groups"],
        }
    )
    for _ in range(45):
        opt.zero_grad()
        backward(p, 1.0)
        q.grad = torch.ones(1)
        opt.step()
        expected.step()
    count = int(start) + 45
    assert opt.state[p]["step"] == opt.state_dict()["state"][0]["step"] == count
    torch.testing.assert_close(opt.state[p]["master"], q.detach(), rtol=1e-6, atol=1e-7)
    opt.close()


def test_b33_a_resumed_run_goes_on_where_it_was():
    def run(optimizer, p, gradients):
        for gradient in gradients:
            optimizer.zero_grad()
            backward(p, float(gradient))
            optimizer.step()

    whole = offload([p := param(1.0)])
    run(whole, p, range(1, 7))
    first = offload([q := param(1.0)])
    run(first, q, range(1, 6))
    second = offload([r := nn.Parameter(q.detach().clone())], lr=0.75, betas=(0.1, 0.2), weight_decay=0.3)
    second.load_state_dict(first.state_dict())
    run(second, r, [6])
    assert_same_bits(r.detach(), p.detach())
    assert r.item() == pytest.approx(0.4172737, abs=1e-6)
    assert second.state[r]["step"] == 6
    group = second.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.9, 0.999), 0.0)
    for each in (whole, first, second):
        each.close()


def test_b47_complex_parameters_are_refused():
    real, complex_ = param(1.0), nn.Parameter(torch.tensor([1 + 1j]))
    with pytest.raises(TypeError, match="parameter 1 of group 0 is torch.complex64, expected one of torch.float32"):
        offload([real, complex_])
    assert not real._post_accumulate_grad_hooks
