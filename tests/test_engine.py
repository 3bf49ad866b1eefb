"""The engine equals one un-bucketed update, bit for bit, whatever the buckets and the timing."""

from __future__ import annotations

import time

import pytest
import torch

import zofftk
from tests.compare import assert_same_bits
from tests.reference.unbucketed import UnbucketedAdamW
from tests.small_gpt import build, loss_of
from zofftk.device.emulated import EmulatedDevice

STEPS = 20
BUCKET_BYTES = [1, 8 * 1024, 24 * 1024, 64 * 1024, 16 * 1024 * 1024]
pytestmark = pytest.mark.usefixtures("no_threads_left")


def reference_run(dtype, max_grad_norm, steps=STEPS):
    model = build(dtype)
    params = list(model.parameters())
    reference = UnbucketedAdamW(params, lr=1e-3, max_grad_norm=max_grad_norm)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, step)
        losses.append(loss.detach())
        norms.append(reference.step(torch.autograd.grad(loss, params)))
    return model, reference, losses, norms


def offload_run(dtype, max_grad_norm, steps=STEPS, **options):
    model = build(dtype)
    opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-3, max_grad_norm=max_grad_norm, **options)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, step)
        losses.append(loss.detach())
        loss.backward()
        opt.step()
        opt.zero_grad()
        norms.append(opt.last_grad_norm)
    return model, opt, losses, norms


def assert_same_run(run, expected):
    model, opt, losses, norms = run
    expected_model, reference, expected_losses, expected_norms = expected
    assert_same_bits(torch.stack(losses), torch.stack(expected_losses), "losses")
    assert norms == expected_norms
    names = [name for name, _ in expected_model.named_parameters()]
    for state, flat in [
        ("master", reference.master),
        ("exp_avg", reference.exp_avg),
        ("exp_avg_sq", reference.exp_avg_sq),
    ]:
        for name, p, value in zip(names, model.parameters(), reference.split(flat), strict=True):
            assert_same_bits(opt.state[p][state], value, f"{state} of {name}")
    for name, p, q in zip(names, model.parameters(), expected_model.parameters(), strict=True):
        assert_same_bits(p, q, name)
        assert opt.state[p]["step"] == len(losses)


@pytest.fixture(scope="module")
def expected():
    runs = {}

    def get(dtype, max_grad_norm):
        if (dtype, max_grad_norm) not in runs:
            runs[dtype, max_grad_norm] = reference_run(dtype, max_grad_norm)
        return runs[dtype, max_grad_norm]

    return get


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_one_unbucketed_update(expected, dtype, bucket_bytes, max_grad_norm):
    run = offload_run(dtype, max_grad_norm, bucket_bytes=bucket_bytes)
    assert_same_run(run, expected(dtype, max_grad_norm))
    run[1].close()


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
@pytest.mark.parametrize("seed", range(20))
def test_timing_changes_no_bit(expected, seed, bucket_bytes, max_grad_norm):
    device = EmulatedDevice(delays=seed, max_delay_ms=0.3, poison=True)
    options = {"bucket_bytes": bucket_bytes, "staging_slots": 1 + seed % 3, "threads": 1 + seed % 2}
    run = offload_run(torch.bfloat16, max_grad_norm, device=device, **options)
    assert_same_run(run, expected(torch.bfloat16, max_grad_norm))
    run[1].close()


@pytest.mark.parametrize("seed", range(3))
def test_timing_changes_no_bit_in_short(expected, seed):
    device = EmulatedDevice(delays=seed, max_delay_ms=0.3, poison=True)
    run = offload_run(torch.bfloat16, 0.5, device=device, bucket_bytes=16 * 1024, staging_slots=1 + seed)
    assert_same_run(run, expected(torch.bfloat16, 0.5))
    run[1].close()


def test_mixed_dtypes_in_one_model():
    def mixed():
        model = build(torch.float32)
        model.blocks[0].to(torch.bfloat16)
        model.blocks[0].register_forward_pre_hook(lambda module, args: args[0].to(torch.bfloat16))
        model.blocks[0].register_forward_hook(lambda module, args, out: out.float())
        return model

    model, expected_model = mixed(), mixed()
    opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-3, bucket_bytes=16 * 1024)
    params = list(expected_model.parameters())
    reference = UnbucketedAdamW(params, lr=1e-3)
    for step in range(3):
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()
        grads = torch.autograd.grad(loss_of(expected_model, step), params)
        reference.step([grad.float() for grad in grads])  # widening is exact
    for p, q in zip(model.parameters(), params, strict=True):
        assert_same_bits(p, q)
    opt.close()


def test_gradients_leave_while_backward_runs():
    model = build(torch.bfloat16, hidden=192, layers=3)
    opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=64 * 1024, trace=True)
    trace = opt._engine.device.trace
    with trace.span("compute", "backward"):
        loss_of(model, 0).backward()
    opt.step()
    backward = next(span for span in trace.spans if span.label == "backward")
    downs = [span for span in trace.spans if span.lane == "down"]
    assert len(downs) > 8
    inside = [span for span in downs if span.start_s < backward.stop_s]
    assert len(inside) > len(downs) / 2
    opt.close()


class SlowUpdates(EmulatedDevice):
    """Every task of the host stream takes 15 ms longer."""

    def _host_task(self, label, task):
        def slow():
            time.sleep(0.015)
            task()

        super()._host_task(label, slow)


def test_copy_back_overlaps_the_update_of_the_next_bucket():
    model = build(torch.bfloat16)
    opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=16 * 1024, device=SlowUpdates(keep_spans=True))
    loss_of(model, 0).backward()
    opt.step()
    spans = opt._engine.device.trace.spans
    adams, ups, backs = ([s for s in spans if s.label.startswith(kind)] for kind in ("adam", "up", "copy back"))
    assert len(adams) == len(ups) == len(backs) > 4
    for up, back, next_adam in zip(ups, backs, adams[1:], strict=False):
        assert up.start_s < next_adam.stop_s
        assert back.start_s < next_adam.stop_s
    opt.close()


def test_bytes_on_the_link_are_the_papers_minimum():
    model = build(torch.bfloat16)
    opt = zofftk.OffloadAdamW(model.parameters())
    for step in range(3):
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()
    report = opt.report()
    per_param = report.num_params * report.steps
    assert report.steps == 3
    assert 2.0 <= report.bytes_up / per_param < 2.01
    assert 2.0 <= report.bytes_down / per_param < 2.03  # statistics included
    assert 14.0 <= report.host_bytes / report.num_params < 14.3
    assert report.device_bytes == 2 * report.num_params
    opt.close()


def test_accumulation_sums_in_fp32_on_the_host():
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0)
    for micro_gradient in [1.0] + [2.0**-8] * 256:
        (p * micro_gradient).sum().backward()
    opt.step()
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.2, rel=1e-6)
    assert opt.last_grad_norm == 2.0
    opt.close()


@pytest.mark.parametrize("bucket_bytes", [1, 1024, 1 << 20])
def test_accumulation_equals_one_sum(bucket_bytes):
    micro = [[1.0, 2.0, 3.0, 4.0], [4.0, 3.0], [2.0, 1.0, 0.5]]
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (1, 5000, 33)]
    opt = zofftk.OffloadAdamW(params, lr=0.1, weight_decay=0.0, bucket_bytes=bucket_bytes)
    expected = [torch.nn.Parameter(torch.zeros(n)) for n in (1, 5000, 33)]
    reference = UnbucketedAdamW(expected, lr=0.1)
    for factors in micro:
        for factor in factors:
            sum((p * factor).sum() for p in params).backward()
        opt.step()
        opt.zero_grad()
        reference.master *= 1 / (1 - 0.1 * 0.01)  # the reference decays; here nothing does
        reference.step([torch.full_like(p, sum(factors)) for p in expected])
    for p, exp_avg in zip(params, reference.split(reference.exp_avg), strict=True):
        assert_same_bits(opt.state[p]["exp_avg"], exp_avg)
    opt.close()


def test_a_parameter_without_a_gradient_keeps_its_bits():
    used, unused = (torch.nn.Parameter(torch.ones(3000, dtype=torch.bfloat16)) for _ in range(2))
    opt = zofftk.OffloadAdamW([used, unused], lr=0.1, weight_decay=0.1)
    for _ in range(2):
        used.sum().backward()
        opt.step()
        opt.zero_grad()
    assert_same_bits(unused, torch.ones(3000, dtype=torch.bfloat16))
    assert unused not in opt.state
    assert opt.last_grad_norm == pytest.approx(3000**0.5)
    (used.sum() + unused.sum()).backward()
    opt.step()
    assert (opt.state[used]["step"], opt.state[unused]["step"]) == (3, 1)
    opt.close()


def test_a_failed_backward_leaves_no_trace():
    def run(fail: bool):
        model = build(torch.bfloat16)
        opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-3, bucket_bytes=16 * 1024)
        for step in range(3):
            if fail:
                loss = loss_of(model, step + 100)
                handle = model.tokens.weight.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                handle.remove()
                opt.zero_grad()
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()
        opt.close()
        return model

    for p, q in zip(run(True).parameters(), run(False).parameters(), strict=True):
        assert_same_bits(p, q)
