"""The optimizer's own loss scale: what it does to gradients, norms and steps, and when it changes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from zofftk import LossScale
from zofftk.standin import StandInError

pytestmark = pytest.mark.usefixtures("no_threads_left")


def states(opt, *params):
    return [opt.state[p][name].clone() for p in params for name in ("master", "exp_avg", "exp_avg_sq")]


def step(opt, params, gradient):
    """A backward in which every parameter's true gradient is `gradient`, and a step."""
    opt.zero_grad()
    opt.scale_loss(sum((p.float() * gradient).sum() for p in params)).backward()
    opt.step()


def test_b04_the_scale_falls_to_its_minimum_names_the_culprit_and_grows_again(caplog):
    good, bad = nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.ones(3).half())
    scale = LossScale(initial=65536.0, backoff=0.5, growth=2.0, growth_interval=4, minimum=1.0)
    opt = zofftk.OffloadAdamW([("good", good), ("bad", bad)], lr=0.1, loss_scale=scale)
    step(opt, [good, bad], 2.0**-17)
    before, weights = states(opt, good, bad), [good.detach().clone(), bad.detach().clone()]

    def overflow():
        opt.zero_grad()
        (opt.scale_loss(good.float().sum() * 1e-6) + bad.sum() * float("inf")).backward()
        opt.step()

    with caplog.at_level(logging.INFO, "zofftk"):
        for k in range(1, 17):
            overflow()
            assert opt.loss_scale == 65536 * 0.5**k
            assert opt.last_step_skipped
    assert opt.loss_scale == 1.0
    assert "loss scale 65536 -> 32768: a step was skipped: the norm is inf, the gradient of 'bad'" in caplog.text
    with pytest.warns(RuntimeWarning, match="the gradient of 'bad' is not finite, with the loss scale at its minimum"):
        overflow()
    assert opt.loss_scale == 1.0
    assert opt.skipped_steps == 17
    assert [opt.state[p]["step"].item() for p in (good, bad)] == [1.0, 1.0]
    for old, new in zip(before, states(opt, good, bad), strict=True):
        assert_same_bits(new, old)
    for old, p in zip(weights, (good, bad), strict=True):
        assert_same_bits(p.detach(), old)
    scales = []
    for _ in range(8):
        step(opt, [good, bad], 1.0)
        scales.append(opt.loss_scale)
    assert scales == [1, 1, 1, 2, 2, 2, 2, 4]
    assert not opt.last_step_skipped
    opt.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # fp16 has subnormal gradients here
@pytest.mark.parametrize("micro", [1, 3])
def test_the_scale_changes_no_bits_where_nothing_under_or_overflows(dtype, micro):
    def train(scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
        opt = zofftk.OffloadAdamW(model.parameters(), lr=0.1, max_grad_norm=0.5, loss_scale=scale)
        norms = []
        for i in range(4):
            for j in range(micro):
                x = torch.full((2, 16), 0.25 + 0.125 * (i + j), dtype=dtype)
                opt.scale_loss(model(x).float().square().sum()).backward()
            clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms += [opt.grad(model[0].weight).norm(), clipped]
            opt.step()
            norms.append(torch.tensor(opt.last_grad_norm))
            opt.zero_grad()
        result = [p.detach().clone() for p in model.parameters()] + states(opt, *model.parameters()) + norms
        opt.close()
        return result

    for scaled, plain in zip(train(16.0), train(None), strict=True):
        assert_same_bits(scaled, plain)


def test_small_gradients_survive_in_fp16():
    """2**-26 is less than half of the smallest fp16 number."""

    def exp_avg(scale):
        p = nn.Parameter(torch.ones(2, dtype=torch.float16))
        opt = zofftk.OffloadAdamW([p], loss_scale=scale)
        opt.scale_loss((p.float() * 2.0**-26).sum()).backward()
        opt.step()
        opt.close()
        return opt.state[p]["exp_avg"].tolist()

    assert exp_avg(None) == [0.0, 0.0]
    assert exp_avg(LossScale()) == pytest.approx([0.1 * 2.0**-26] * 2)


def test_the_scale_is_saved_and_loaded():
    def build(scale):
        p = nn.Parameter(torch.ones(2))
        return p, zofftk.OffloadAdamW([p], loss_scale=scale)

    rule = LossScale(initial=8.0, growth_interval=3)
    p, opt = build(rule)
    for gradient in (1.0, float("inf"), 1.0, 1.0):
        step(opt, [p], gradient)
    saved = opt.state_dict()
    assert saved["loss_scale"] == {"value": 4.0, "good_steps": 2}
    q, other = build(rule)
    other.load_state_dict(saved)
    step(other, [q], 1.0)
    assert other.loss_scale == 8.0
    _, constant = build(2.0)
    constant.load_state_dict(saved)
    assert constant.loss_scale == 2.0
    assert "loss_scale" not in constant.state_dict()
    torch.optim.AdamW([nn.Parameter(torch.ones(2))]).load_state_dict(saved)
    for each in (opt, other, constant):
        each.close()


def test_one_scale_is_enough():
    p = nn.Parameter(torch.ones(2))
    opt = zofftk.OffloadAdamW([p], loss_scale=LossScale())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    with pytest.raises(StandInError, match="loss_scale and a GradScaler exclude each other"):
        scaler.step(opt)
    opt.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0.5}, "initial of the loss scale must be a number above 0, at least 1, got 0.5"),
        ({"minimum": 0.0}, "minimum of the loss scale must be a number above 0, at least 0, got 0.0"),
        ({"growth": 0.5}, "growth of the loss scale must be a number above 0, at least 1, got 0.5"),
        ({"backoff": 2.0}, "backoff of the loss scale must be a number above 0, at most 1, got 2.0"),
        ({"initial": float("inf")}, "initial of the loss scale"),
        ({"growth_interval": 0}, "growth_interval must be 1 or more, got 0"),
        ({"growth_interval": 1.5}, "growth_interval must be a whole number, got 1.5"),
    ],
)
def test_wrong_rules(options, message):
    with pytest.raises(ValueError, match=message):
        LossScale(**options)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), "dynamic", True])
def test_wrong_options(scale):
    with pytest.raises(ValueError, match="loss_scale must be a LossScale, a positive number or None"):
        zofftk.OffloadAdamW([nn.Parameter(torch.ones(2))], loss_scale=scale)
