"""The one-step delayed update: the engine against the rule in its plainest form, bit for bit; its time and bytes."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from torch import nn

import zofftk
from tests.delayed_rule import HYPER, Pair, each_delay, each_mode, loss_of, mlp
from tests.small_gpt import build
from tests.small_gpt import loss_of as gpt_loss
from zofftk.device.base import HOST
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left", "at_once")


@each_mode
@each_delay
@pytest.mark.parametrize(
    ("dtype", "max_grad_norm"), [(torch.bfloat16, 0.05), (torch.float16, None), (torch.float32, 0.05)]
)
def test_equals_the_rule(mode, delay_after, dtype, max_grad_norm):
    pair = Pair(lambda: mlp(dtype), mode, delay_after=delay_after, max_grad_norm=max_grad_norm)
    for step in range(8):
        pair.train(loss_of, 1)
        for each in (pair.opt, pair.plain):
            each.param_groups[0]["lr"] = 1e-2 / (2 + step)
    pair.assert_same()
    pair.close()


@each_mode
@pytest.mark.parametrize("kind", HYPER)
def test_each_optimizer_equals_the_rule(kind, mode):
    pair = Pair(mlp, mode, kind, delay_after=2, max_grad_norm=1.0)
    pair.train(loss_of, 7)
    pair.assert_same()
    pair.close()


@each_mode
@pytest.mark.parametrize(("slots", "bucket_bytes", "seed"), [(1, 1, 0), (2, 8 * 1024, 1), (3, 1 << 20, 2)])
def test_timing_slots_and_buckets_change_no_bit(mode, slots, bucket_bytes, seed):
    device = EmulatedDevice(delays=seed, max_delay_ms=0.3, poison=True)
    options = {"device": device, "staging_slots": slots, "bucket_bytes": bucket_bytes, "threads": 1 + seed}
    pair = Pair(build, mode, delay_after=1, max_grad_norm=0.5, **options)
    pair.train(gpt_loss, 4)
    pair.assert_same()
    pair.close()


@pytest.mark.parametrize(
    ("delay", "expected", "end"),
    [
        (None, [1, 0.9, 0.8004122, 0.7015863, 0.6039391, 0.5079637], 0.4142365),
        (0, [1, 1, 0.9, 0.8, 0.7004839, 0.6018784], 0.4092724),
    ],
)
@pytest.mark.parametrize("evaluate", [False, True])
def test_b22_the_weights_each_forward_sees(delay, expected, end, evaluate):
    class Slow(EmulatedDevice):
        def _host_task(self, label, task):
            super()._host_task(label, lambda: (time.sleep(0.02), task()))

    p = nn.Parameter(torch.tensor([1.0]))
    policy = {} if delay is None else {"update": "delayed", "delay_after": delay}
    opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0, device=Slow(), **policy)
    seen = []
    for step in range(6):
        seen.append(p.item())
        (p**2 / 2).sum().backward()
        opt.step()
        opt.zero_grad()
        if evaluate and step in (1, 3):
            with torch.no_grad():
                assert (p + 0).item() == p.item()
    assert seen == pytest.approx(expected, abs=1e-6)
    opt.flush()
    assert p.item() == pytest.approx(end, abs=1e-6)
    opt.close()


# -- time and bytes ------------------------------------------------------------------------------------------------


class Gated(EmulatedDevice):
    """Each update of a bucket from `hold()` on begins when its gate is opened, and says when it has ended."""

    def __init__(self):
        super().__init__(keep_spans=True)
        self.gates, self.ended, self.holds = [], [], False

    def hold(self):
        self.holds = True

    def _host_task(self, label, task):
        if not self.holds or not label.startswith("adam"):
            super()._host_task(label, task)
            return
        gate, ended = threading.Event(), threading.Event()
        self.gates.append(gate)
        self.ended.append(ended)
        self._enqueue(HOST, lambda: gate.wait(20))
        super()._host_task(label, task)
        self._enqueue(HOST, ended.set)

    def run_one(self, number):
        """Returns when that update has ended, which it does only if nothing that runs now is waited for."""
        self.gates[number].set()
        assert self.ended[number].wait(10), "the update does not run beside this"


class RunsUpdates(torch.autograd.Function):
    """Forward goes on after the first update of the step before has ended, backward after the others."""

    @staticmethod
    def forward(ctx, x, device):
        ctx.device = device
        device.run_one(0)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        for number in range(1, len(ctx.device.gates)):
            ctx.device.run_one(number)
        return grad, None


@each_mode
def test_an_update_runs_inside_the_forward_and_the_backward_of_the_next_step(mode):
    device = Gated()
    pair = Pair(mlp, mode, device=device)
    pair.train(loss_of, 2)
    device.hold()
    pair.train(loss_of, 1)
    device.holds = False

    def held_loss(model, step):
        return RunsUpdates.apply(loss_of(model, step), device)

    times = [time.perf_counter()]
    loss = held_loss(pair.model, 3)
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    loss_of(pair.twin, 3).backward()
    pair.step()
    device.synchronize(device.record(HOST), "test: the spans must be complete")
    updates = sorted((s.start_s, s.stop_s) for s in pair.opt.trace.spans if s.label.startswith("adam"))
    for start, stop in itertools.pairwise(times):
        assert any(start < begun and ended < stop for begun, ended in updates)
    pair.assert_same()
    pair.close()


@each_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_costs_a_second_gradient_on_the_host_and_nothing_on_the_device(mode, dtype):
    def build_layer():
        return nn.Linear(256, 160, bias=False).to(dtype)

    def sizes(update):
        pair = Pair(build_layer, mode, update=update, bucket_bytes=16 * 1024)
        for _ in range(3):
            pair.opt.zero_grad()
            pair.model(torch.ones(2, 256, dtype=dtype)).sum().backward()
            pair.opt.step()
        report = pair.opt.report()
        pair.opt.close()
        return report

    late, now = sizes("delayed"), sizes("synchronous")
    numel = 256 * 160
    assert late.host_bytes == (12 + 2 * dtype.itemsize) * numel + 8 * numel // 4096
    assert late.host_bytes - now.host_bytes == dtype.itemsize * numel
    assert late.staging_bytes == now.staging_bytes > 0
    assert late.bytes_down == now.bytes_down
    assert late.bytes_up == now.bytes_up - dtype.itemsize * numel  # the last one is late


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": "late"}, "update must be one of synchronous, delayed, got 'late'"),
        ({"delay_after": -1}, "delay_after must be 0 or more steps, got -1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        zofftk.OffloadAdamW([nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize(
    "saved", [{}, {"steps": 1, "late": [-1]}, {"steps": 1, "late": [0]}, {"steps": None, "late": []}]
)
def test_what_is_no_saved_delay(saved):
    opt = zofftk.OffloadAdamW([nn.Parameter(torch.ones(2))], update="delayed")
    with pytest.raises(ValueError, match="the saved entry 'delayed' is .* expected its steps and late parameters"):
        opt.load_state_dict({**opt.state_dict(), "delayed": saved})
    opt.close()
