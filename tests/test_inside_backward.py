"""The exchange inside backward: same bits as at the step, and only where nothing reads the old weights any more."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zofftk
from tests import delayed_rule
from tests.compare import assert_same_bits
from tests.delayed_rule import HYPER, mlp
from tests.delayed_rule import loss_of as loss
from tests.programs.models import Breaks
from tests.small_gpt import build, loss_of
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left")
FALLS_BACK = "delayed values are exchanged at step(), not inside backward"


class Watched(EmulatedDevice):
    """Counts the copies to the device that are enqueued inside a backward."""

    inside = 0

    def copy_up(self, *args, **kwargs):
        self.inside += torch._C._current_graph_task_id() != -1
        super().copy_up(*args, **kwargs)


def open_delayed(model, **options):
    options = {
        "bucket_bytes": 1,
        "device": Watched(delays=1, poison=True),
        **HYPER["AdamW"],
        "delay_after": 0,
        **options,
    }
    return zofftk.OffloadAdamW(model.named_parameters(), update="delayed", backwards_per_step=1, **options)


class Pair(delayed_rule.Pair):
    """With one loss, and one backward a step announced."""

    def __init__(self, make, loss, **options):
        options = {"device": Watched(delays=1, poison=True), **options}
        super().__init__(make, {"backwards_per_step": 1}, **options)
        self.loss = loss
        self.device = self.opt._engine.device
        self.num_buckets = len(self.opt._engine.buckets)

    def backward(self, loss=None):
        super().backward(loss or self.loss)

    def train(self, steps):
        super().train(self.loss, steps)

    def finish(self):
        self.assert_same()
        self.opt.close()


@pytest.mark.parametrize("hand_over", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_same_bits_as_at_the_step(slots, hand_over, caplog):
    pair = Pair(mlp, loss, staging_slots=slots, max_grad_norm=0.05)
    if hand_over:
        zofftk.offload(pair.model, pair.opt)
    pair.train(6)
    # The first step has nothing late to bring; with one slot, gradients need it.
    assert pair.device.inside == (0 if slots == 1 else 5 * pair.num_buckets)
    assert caplog.text.count(f"{FALLS_BACK} as backwards_per_step=1 allows, with a single") == (1 if slots == 1 else 0)
    pair.finish()


def test_nothing_is_left_for_the_step():
    pair = Pair(mlp, loss)
    pair.train(2)
    pair.backward()
    sent = pair.device.bytes_up
    pair.step()
    assert pair.device.bytes_up == sent
    pair.finish()


def test_tied_weights():
    pair = Pair(lambda: build(torch.bfloat16), loss_of, bucket_bytes=4096)
    pair.train(4)
    assert pair.device.inside == 3 * pair.num_buckets
    pair.finish()


class Recomputed(nn.Module):
    def __init__(self, use_reentrant, times):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = (nn.Linear(70, 70) for _ in range(3))
        self.use_reentrant, self.times = use_reentrant, times

    def forward(self, step):
        x = self.first(torch.full((2, 70), 0.25 * (1 + step)))
        for _ in range(self.times):
            x = checkpoint(self.inner, x.tanh(), use_reentrant=self.use_reentrant)
        return self.last(x).square().sum()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation(use_reentrant, times, caplog):
    pair = Pair(lambda: Recomputed(use_reentrant, times), lambda model, step: model(step))
    pair.train(5)
    assert pair.device.inside == (0 if use_reentrant else 4 * pair.num_buckets)
    told = [record.message for record in caplog.records if FALLS_BACK in record.message]
    assert len(told) == (1 if use_reentrant else 0)
    pair.finish()


def test_unannounced_accumulation_is_an_error_that_loses_nothing():
    pair = Pair(mlp, loss)
    pair.train(3)
    pair.backward()
    with pytest.raises(RuntimeError, match="backwards_per_step=1 announced a single one; leave that option out"):
        loss(pair.model, 9).backward()
    pair.zero_grad()
    pair.opt.synchronize()
    pair.plain.flush()  # its values are in the model already
    for p, q in zip((p.detach() for p in pair.model.parameters()), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=0, atol=0)
    pair.train(2)
    pair.finish()


def test_accumulation_from_the_start_falls_back(caplog):
    pair = Pair(mlp, loss)
    for _ in range(4):
        for _ in range(2):
            loss(pair.model, pair.steps).backward()
            loss(pair.twin, pair.steps).backward()
        pair.opt.step()
        pair.opt.zero_grad()
        pair.steps += 1
    assert pair.device.inside == 0
    assert caplog.text.count(FALLS_BACK) == 1
    pair.opt.close()


@pytest.mark.parametrize("drop", ["zero_grad", "by hand"])
def test_a_dropped_backward_is_none(drop):
    """A GradScaler that skips, a batch that is left out: what was late has come all the same."""
    pair = Pair(mlp, loss)
    pair.train(3)
    pair.backward()
    if drop == "zero_grad":
        pair.zero_grad()
    else:
        for p in pair.model.parameters():
            p.grad = None
        pair.plain.zero_grad()
    pair.plain.flush()
    pair.train(3)
    assert pair.device.inside == (2 + 1 + 2) * pair.num_buckets
    pair.finish()


def test_a_backward_that_fails_leaves_no_value_under_way():
    pair = Pair(mlp, loss)
    pair.train(3)
    inside = pair.device.inside
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    with pytest.raises(ArithmeticError):
        pair.model[1:](Breaks.apply(pair.model[0](x))).sum().backward()
    assert pair.device.inside > inside
    pair.opt.zero_grad()
    for p in (pair.model[4].weight, pair.model[4].bias, pair.model[2].bias):  # of the bucket that was full
        assert_same_bits(p.detach(), pair.opt.state[p]["master"].to(p.dtype))
    loss(pair.model, 9).backward()  # brings the others
    for p in pair.model.parameters():
        assert_same_bits(p.detach(), pair.opt.state[p]["master"].to(p.dtype))
    pair.opt.step()
    pair.opt.close()


def test_a_graph_that_is_kept_is_still_whole():
    pair = Pair(mlp, loss)
    pair.train(2)
    inside = pair.device.inside
    value = loss(pair.model, pair.steps)
    value.backward(retain_graph=True)
    assert pair.device.inside == inside
    torch.autograd.grad(value, list(pair.model.parameters()))  # raises where weights have changed
    loss(pair.twin, pair.steps).backward()
    pair.step()
    pair.train(2)
    assert pair.device.inside == inside + 2 * pair.num_buckets
    pair.finish()


def test_a_weight_that_the_graph_uses_past_autograd_is_its_own_error():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(70, 70, bias=False) for _ in range(4))

        def forward(self, x):
            first, second, third, last = self.layers
            return last(third(second(nn.functional.linear(first(x), last.weight.detach()))))

    model = Detached()
    opt = open_delayed(model, staging_slots=2)
    x = torch.ones(1, 70)
    model(x).sum().backward()
    opt.step()
    opt.zero_grad()
    value = model(x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    opt.close()


def test_an_unused_parameter_gets_its_value_at_the_step():
    def layers():
        torch.manual_seed(0)
        return nn.ModuleList(nn.Linear(70, 70, bias=False) for _ in range(3))

    def some(layers, step):
        used = [layer for i, layer in enumerate(layers) if i == 0 or (step + i) % 2]
        return sum(layer(torch.full((1, 70), 0.5)).sum() for layer in used)

    pair = Pair(layers, some)
    pair.train(6)
    assert 0 < pair.device.inside < 5 * pair.num_buckets
    pair.finish()


def test_a_parameter_that_was_written_to_waits_for_the_step_to_refuse():
    pair = Pair(mlp, loss)
    pair.train(3)
    with torch.no_grad():
        pair.model[0].weight.fill_(5.0)
    loss(pair.model, 3).backward()
    with pytest.raises(RuntimeError, match="of group 0 was written to while a delayed update of it was under way"):
        pair.opt.step()
    assert (pair.model[0].weight == 5.0).all()
    with pytest.raises(RuntimeError, match="of group 0 was written to while a delayed update of it was under way"):
        pair.opt.close()


def test_saving_between_backward_and_step():
    pair = Pair(mlp, loss)
    pair.train(3)
    pair.backward()
    saved = pair.opt.state_dict()
    assert saved["delayed"]["late"] == []
    pair.plain.flush()
    for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=0)
    pair.step()
    pair.finish()


def test_switching_off_and_on():
    pair = Pair(mlp, loss)
    pair.train(3)
    pair.opt.switch_update("synchronous")
    pair.plain.flush()
    pair.plain.delay_after = 99
    pair.train(2)
    pair.opt.switch_update("delayed")
    pair.plain.delay_after = 0
    inside = pair.device.inside
    pair.train(3)
    assert pair.device.inside == inside + 2 * pair.num_buckets
    pair.finish()


@pytest.mark.parametrize("value", [0, True, 1.0, "1"])
def test_wrong_options(value):
    with pytest.raises(ValueError, match="backwards_per_step must be 1 or more, or None, got"):
        zofftk.OffloadAdamW([nn.Parameter(torch.ones(2))], backwards_per_step=value)
