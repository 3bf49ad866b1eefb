"""The one-step delayed update: the engine against the rule in its plainest form, bit for bit."""

from __future__ import annotations

import copy
import math
import time

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from tests.small_gpt import build, loss_of
from zofftk import LossScale
from zofftk.cpu_adam import adamw_step
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left")


class DelayedAdamW:
    """From step `delay_after` + 1 on, a gradient is applied at the next step, with the hyper-parameters of its own."""

    def __init__(self, params, delay_after, max_grad_norm=None, **hyper):
        self.params, self.delay_after, self.max_grad_norm, self.hyper = list(params), delay_after, max_grad_norm, hyper
        self.states = {p: [p.detach().float().clone().view(-1), *torch.zeros(2, p.numel())] for p in self.params}
        self.counts, self.steps, self.pending = dict.fromkeys(self.params, 0), 0, []

    def step(self):
        self.flush()
        grads = {p: p.grad.detach().clone().view(-1) for p in self.params if p.grad is not None}
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
        self.steps += 1
        if math.isfinite(norm):
            clip = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
            self.pending = [(p, g, clip, dict(self.hyper)) for p, g in grads.items()]
        if self.steps <= self.delay_after:
            self.flush()

    def flush(self):
        for p, grad, clip, hyper in self.pending:
            self.counts[p] += 1
            new = torch.empty_like(grad)
            adamw_step(*self.states[p], grad, step=self.counts[p], grad_scale=clip, out=new, threads=1, **hyper)
            with torch.no_grad():
                p.copy_(new.view_as(p))
        self.pending = []


HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def mlp(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 70), nn.Tanh(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 4)).to(dtype)


def loss(model, step):
    x = torch.full((3, 16), 0.25 + 0.125 * (step % 7), dtype=next(model.parameters()).dtype)
    return model(x).float().square().sum() * (1 + step % 3)


def delayed(model, delay_after=0, **options):
    options = {"bucket_bytes": 1, "device": EmulatedDevice(delays=1, poison=True), **HYPER, **options}
    return zofftk.OffloadAdamW(model.named_parameters(), update="delayed", delay_after=delay_after, **options)


def train(model, optimizer, steps, between=lambda step: None):
    losses = []
    for step in steps:
        optimizer.zero_grad() if hasattr(optimizer, "zero_grad") else [
            setattr(p, "grad", None) for p in optimizer.params
        ]
        value = loss(model, step)
        losses.append(value.detach())
        value.backward()
        optimizer.step()
        between(step)
    return torch.stack(losses)


def assert_equal(model, opt, twin, plain):
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())
        for name, state in zip(("master", "exp_avg", "exp_avg_sq"), plain.states[q], strict=True):
            assert_same_bits(opt.state[p][name].reshape(-1), state, name)
        assert opt.state[p]["step"] == plain.counts[q]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("delay_after", [0, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("hand_over", [False, True])
def test_equals_the_rule(dtype, delay_after, max_grad_norm, hand_over):
    model, twin = mlp(dtype), mlp(dtype)
    opt = delayed(model, delay_after, max_grad_norm=max_grad_norm)
    if hand_over:
        zofftk.offload(model, opt)
    plain = DelayedAdamW(twin.parameters(), delay_after, max_grad_norm, **HYPER)

    def between(step):
        if step % 3 == 1:  # an evaluation changes nothing
            with torch.no_grad():
                loss(model, 100 + step)
        opt.param_groups[0]["lr"] = 1e-2 / (2 + step)

    def between_plain(step):
        plain.hyper["lr"] = 1e-2 / (2 + step)

    losses = train(model, opt, range(9), between)
    expected = train(twin, plain, range(9), between_plain)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    opt.flush()
    plain.flush()
    opt.synchronize()
    assert_equal(model, opt, twin, plain)
    opt.close()


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


def test_the_update_runs_beside_the_next_step():
    class Slow(EmulatedDevice):
        def _host_task(self, label, task):
            super()._host_task(label, lambda: (time.sleep(0.005), task()))

    model = build(torch.bfloat16)
    opt = delayed(model, bucket_bytes=16 * 1024, device=Slow(keep_spans=True))
    for step in range(3):
        loss_of(model, step).backward()
        opt.step()
        returned = time.perf_counter()
        opt.zero_grad()
    loss_of(model, 3).backward()
    backward_done = time.perf_counter()
    opt.flush()
    adams = [span for span in opt.trace.spans if span.label.startswith("adam") and span.stop_s > returned]
    assert len(adams) > 3
    assert adams[0].start_s < backward_done
    plain = zofftk.OffloadAdamW(build(torch.bfloat16).parameters(), bucket_bytes=16 * 1024)
    assert opt.report().staging_bytes == plain.report().staging_bytes
    for each in (opt, plain):
        each.close()


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("at", [2, 5])
def test_a_run_with_a_save_in_it_has_the_same_bits(order, at, tmp_path):
    model = mlp()
    opt = delayed(model, 3)
    whole = train(model, opt, range(9))
    opt.flush()

    first = mlp()
    half = delayed(first, 3)
    losses = [train(first, half, range(at))]
    zofftk.save(tmp_path / "run.pt", {"model": first.state_dict(), "optimizer": half.state_dict()})
    losses.append(train(first, half, range(at, 9)))  # saving flushes nothing
    saved = zofftk.load(tmp_path / "run.pt")
    second = mlp()
    resumed = delayed(second, 3, bucket_bytes=20_000)
    train(second, resumed, range(5))  # whatever was before
    resumed.zero_grad()
    loads = [lambda: second.load_state_dict(saved["model"]), lambda: resumed.load_state_dict(saved["optimizer"])]
    for load in loads if order == "model first" else reversed(loads):
        load()
    again = train(second, resumed, range(at, 9))
    for result in (torch.cat(losses), torch.cat([whole[:at], again])):
        torch.testing.assert_close(result, whole, rtol=0, atol=0)
    for other, o in ((first, half), (second, resumed)):
        o.flush()
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            assert_same_bits(p.detach(), q.detach())
            for name in ("master", "exp_avg", "exp_avg_sq"):
                assert_same_bits(o.state[p][name], opt.state[q][name], name)
        o.close()
    opt.close()


def test_a_delayed_state_in_a_synchronous_optimizer():
    model = mlp()
    opt = delayed(model)
    train(model, opt, range(4))
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    opt.flush()
    twin = mlp()
    synchronous = zofftk.OffloadAdamW(twin.parameters(), **HYPER)
    twin.load_state_dict(weights)
    synchronous.load_state_dict(states)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())
    for each in (opt, synchronous):
        each.close()


def test_an_overflow_skips_its_own_gradient_alone():
    model, twin = mlp(torch.float32), mlp(torch.float32)
    opt = delayed(model, loss_scale=LossScale(initial=4.0))
    plain = DelayedAdamW(twin.parameters(), 0, **HYPER)
    for step in range(6):
        opt.zero_grad()
        for p in plain.params:
            p.grad = None
        factor = float("inf") if step == 3 else 1.0
        (opt.scale_loss(loss(model, step)) * factor).backward()
        (loss(twin, step) * factor).backward()
        opt.step()
        plain.step()
        assert opt.last_step_skipped == (step == 3)
    opt.flush()
    plain.flush()
    assert_equal(model, opt, twin, plain)
    assert opt.skipped_steps == 1
    opt.close()


def test_switching_off_and_on():
    model, twin = mlp(), mlp()
    opt, plain = delayed(model), DelayedAdamW(twin.parameters(), 0, **HYPER)
    for steps, update, delay_after in (
        (range(3), "synchronous", 99),
        (range(3, 6), "delayed", 0),
        (range(6, 9), None, 0),
    ):
        train(model, opt, steps)
        train(twin, plain, steps)
        if update is not None:
            opt.switch_update(update)
            plain.flush()
            plain.delay_after = delay_after
    opt.close()  # flushes
    plain.flush()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())


def test_writing_while_an_update_is_late_is_refused():
    model = mlp(torch.float32)
    opt = delayed(model)
    train(model, opt, range(2))
    before = opt.state[model[0].weight]["master"].clone()
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    with pytest.raises(RuntimeError, match=r"'0.weight' was written to while a delayed update .* call flush\(\)"):
        train(model, opt, range(2, 3))
    assert_same_bits(opt.state[model[0].weight]["master"], before)
    opt.refresh()  # b07: the written value stands
    opt.zero_grad()
    train(model, opt, range(3, 4))
    assert (model[0].weight == 5.0).all()
    opt.flush()
    assert (model[0].weight - 5.0).abs().max() < 0.1
    opt.close()


def test_a_refresh_loses_no_other_parameters_update():
    model, twin = mlp(), mlp()
    opt, plain = delayed(model), DelayedAdamW(twin.parameters(), 0, **HYPER)
    train(model, opt, range(3))
    train(twin, plain, range(3))
    opt.refresh()
    train(model, opt, range(3, 5))
    train(twin, plain, range(3, 5))
    opt.flush()
    plain.flush()
    assert_equal(model, opt, twin, plain)
    opt.close()


def test_a_group_that_is_added_after_switching():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = zofftk.OffloadAdamW([first], lr=0.1, weight_decay=0.0)
    opt.switch_update("delayed")
    opt.add_param_group({"params": [second]})
    seen = []
    for _ in range(3):
        (first.sum() + second.sum()).backward()
        opt.step()
        opt.zero_grad()
        seen.append([first[0].item(), second[0].item()])
    assert seen[0] == [1.0, 1.0]
    assert seen[1:] == [pytest.approx([0.9, 0.9]), pytest.approx([0.8, 0.8])]
    opt.close()


@pytest.mark.parametrize(
    "saved", [{}, {"steps": 1, "late": [-1]}, {"steps": 1, "late": [2]}, {"steps": None, "late": []}]
)
def test_what_is_no_saved_delay(saved):
    opt = zofftk.OffloadAdamW([nn.Parameter(torch.ones(2))], update="delayed")
    with pytest.raises(ValueError, match="the saved entry 'delayed' is .* expected its steps and late parameters"):
        opt.load_state_dict({**opt.state_dict(), "delayed": saved})
    opt.close()


def test_accumulation_and_unused_parameters():
    def run(late):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(70, 70) for _ in range(3))
        options = {"update": "delayed", "delay_after": 0} if late else {}
        opt = zofftk.OffloadAdamW(layers.parameters(), bucket_bytes=1, **HYPER, **options)
        seen = []
        for step in range(6):
            opt.zero_grad()
            for micro in range(1 + step % 3):
                used = [layer for i, layer in enumerate(layers) if i == 0 or (step + i) % 2]
                x = torch.full((1, 70), 0.1 * (micro + 1))
                sum(layer(x).sum() * (step + 1) for layer in used).backward()
            opt.step()
            seen.append([p.detach().clone() for p in layers.parameters()])
        opt.close()
        seen.append([p.detach().clone() for p in layers.parameters()])
        return seen

    late, now = run(True), run(False)  # linear: gradients do not depend on the weights
    for a, b in zip(late[1:], now[:6], strict=True):
        for p, q in zip(a, b, strict=True):
            assert_same_bits(p, q)


def test_dropping_it_without_close_says_so(caplog):
    model = mlp()
    opt = delayed(model)
    train(model, opt, range(2))
    del opt
    assert "the last delayed update has not reached the parameters: call close() or flush()" in caplog.text


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


def test_a_flush_right_after_loading():
    model = mlp()
    opt = delayed(model)
    train(model, opt, range(4))
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    opt.flush()
    for model_first in (True, False):
        twin = mlp()
        other = delayed(twin)
        if model_first:
            twin.load_state_dict(weights)
        other.load_state_dict(states)
        if not model_first:
            twin.load_state_dict(weights)
        other.flush()
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            assert_same_bits(p.detach(), q.detach())
        other.close()
    opt.close()
