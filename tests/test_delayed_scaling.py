"""The delayed update with scaled losses, clipping by the trainer and by the engine, and steps that overflow."""

from __future__ import annotations

import math

import pytest
import torch

import zofftk
from tests.delayed_rule import HYPER, Delayed, Pair, each_mode, loss_of, mlp
from zofftk import LossScale

pytestmark = [
    pytest.mark.usefixtures("no_threads_left", "at_once"),
    pytest.mark.filterwarnings("ignore:a step was skipped"),
]
# Steps that overflow, and of the 8 the first that is late: its own gradient, one before it, two in a row, the last.
HALF, FULL = torch.float16, torch.float32
each_overflow = pytest.mark.parametrize(
    ("overflows", "delay_after", "dtype"),
    [({0}, 0, HALF), ({3}, 3, FULL), ({2}, 3, HALF), ({3, 4}, 0, FULL), ({3, 4, 7}, 3, HALF), ({1, 7}, 1, FULL)],
)


class PlainScale:
    """The rule of dynamic loss scales, ours and `GradScaler`'s, for the plain optimizer."""

    def __init__(self, plain: Delayed, value: float, growth_interval: int) -> None:
        self.plain, self.value, self.growth_interval, self.good = plain, value, growth_interval, 0

    def unscale(self) -> None:
        self.plain.factor *= 1.0 / self.value

    def is_finite(self) -> bool:
        return all(math.isfinite(one) for one in self.plain.square_sums())

    def update(self, skipped: bool) -> None:
        self.good = 0 if skipped else self.good + 1
        if skipped:
            self.value *= 0.5
        elif self.good == self.growth_interval:
            self.value, self.good = self.value * 2, 0


def overflowing(overflows):
    """A loss whose gradients are not finite in some steps."""

    def loss(model, step):
        value = loss_of(model, step)
        return value * float("inf") if step in overflows else value

    return loss


@each_mode
@each_overflow
def test_b36_a_grad_scaler_with_and_without_clipping(mode, overflows, delay_after, dtype):
    """A scaler does not call step() where it has found an overflow: what is late stays so until it does."""
    pair = Pair(lambda: mlp(dtype), mode, delay_after=delay_after)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    plain = PlainScale(pair.plain, 64.0, 3)
    for step in range(8):
        assert scaler.get_scale() == plain.value
        pair.backward(overflowing(overflows), scaled=(scaler.scale, lambda loss: loss * plain.value))
        finite = plain.is_finite()
        plain.unscale()
        if step % 2:
            scaler.unscale_(pair.opt)
            norm = torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 0.5)
            torch.testing.assert_close(norm, pair.plain.clip_grad_norm_(0.5), rtol=0, atol=0, equal_nan=True)
        scaler.step(pair.opt)
        scaler.update()
        if finite:
            pair.plain.step()
        elif "backwards_per_step" in mode:
            pair.plain.flush()  # it has come inside this backward
        plain.update(skipped=not finite)
        pair.zero_grad()
    assert pair.opt.skipped_steps == 0
    pair.assert_same()
    pair.close()


@each_mode
@each_overflow
def test_our_loss_scale_skips_the_gradient_that_overflows_alone(mode, overflows, delay_after, dtype):
    """A skipped step applies what is late: its own gradient is the one that is dropped."""
    max_grad_norm = 0.5 if 3 in overflows else None
    scale = LossScale(initial=64.0, growth_interval=3)
    pair = Pair(lambda: mlp(dtype), mode, delay_after=delay_after, max_grad_norm=max_grad_norm, loss_scale=scale)
    plain = PlainScale(pair.plain, 64.0, 3)
    for step in range(8):
        assert pair.opt.loss_scale == plain.value
        pair.backward(overflowing(overflows), scaled=(pair.opt.scale_loss, lambda loss: loss * plain.value))
        plain.unscale()
        pair.step()
        assert pair.opt.last_step_skipped == pair.plain.skipped == (step in overflows)
        plain.update(pair.plain.skipped)
    assert pair.opt.skipped_steps == len(overflows)
    pair.assert_same()
    pair.close()


@each_mode
@each_overflow
def test_an_overflow_without_a_scale(mode, overflows, delay_after, dtype):
    pair = Pair(lambda: mlp(dtype), mode, delay_after=delay_after, max_grad_norm=0.5)
    pair.train(overflowing(overflows), 8)
    assert pair.opt.skipped_steps == len(overflows)
    pair.assert_same()
    pair.close()


@each_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipping_by_the_trainer_and_by_the_engine(mode, dtype):
    """Each is captured with its own step; both at once multiply."""
    pair = Pair(lambda: mlp(dtype), mode, max_grad_norm=0.6)
    for step in range(8):
        pair.backward(loss_of)
        if step % 3:
            norm = torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 0.5 + 0.1 * step)
            torch.testing.assert_close(norm, pair.plain.clip_grad_norm_(0.5 + 0.1 * step), rtol=0, atol=0)
        pair.step()
    pair.assert_same()
    pair.close()


def test_clipping_outside_and_inside_are_the_same():
    results = []
    for inside in (True, False):
        model = mlp(torch.float32)
        options = {"max_grad_norm": 0.5} if inside else {}
        opt = zofftk.OffloadAdamW(model.parameters(), **HYPER["AdamW"], update="delayed", delay_after=1, **options)
        for step in range(6):
            loss_of(model, step).backward()
            if not inside:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
        opt.close()
        results.append([p.detach() for p in model.parameters()])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
