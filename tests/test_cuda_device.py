"""The CUDA device's own logic, on a runtime of threads: the engine's bits, page-locked memory, faults, its end."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

import zofftk
from tests.compare import assert_same_bits
from tests.fake_cuda import FakeError, FakeRuntime
from tests.small_gpt import build, loss_of
from zofftk.device import device_kernels, host_kernels
from zofftk.device.cuda import CudaDevice
from zofftk.device.pinned import PinnedMemory

pytestmark = pytest.mark.usefixtures("no_threads_left")


def open_fake(*, pinned_bytes=None, keep_spans=False, kernels=host_kernels, **options):
    runtime = FakeRuntime(**options)
    device = CudaDevice(
        torch.device("cpu"),
        runtime=runtime,
        compute_stream=lambda: 0,
        kernels=kernels,
        on_stream=runtime.issue,
        pinned_bytes=pinned_bytes,
        keep_spans=keep_spans,
    )
    return device, runtime


def train(device=None, *, hand_over=False, micro=1, steps=4):
    model = build(torch.bfloat16)
    opt = zofftk.OffloadAdamW(
        model.parameters(), lr=1e-2, max_grad_norm=0.5, bucket_bytes=16 * 1024, staging_slots=2, device=device
    )
    if hand_over:
        zofftk.offload(model, opt)
    for step in range(steps):
        for i in range(micro):
            loss_of(model, 10 * step + i).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    states = [opt.state[p] for p in model.parameters()]
    report = opt.report()
    opt.close()
    return list(model.parameters()), states, report


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("hand_over", [False, True])
@pytest.mark.parametrize("delay_ms", [0.0, 2.0])
def test_the_engine_has_the_emulated_devices_bits(delay_ms, hand_over, micro):
    device, _ = open_fake(delay_ms=delay_ms)
    params, states, _ = train(device, hand_over=hand_over, micro=micro)
    expected_params, expected_states, _ = train(micro=micro)
    for p, q, s, t in zip(params, expected_params, states, expected_states, strict=True):
        assert_same_bits(p, q)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert_same_bits(s[name], t[name], name)


def test_the_plans_of_the_triton_kernels_fit_the_engine():
    """On CPU tensors the plans run the eager twins: the same tables, the same bits."""
    device, _ = open_fake(kernels=device_kernels)
    params, states, _ = train(device)
    expected_params, expected_states, _ = train()
    for p, q, s, t in zip(params, expected_params, states, expected_states, strict=True):
        assert_same_bits(p, q)
        assert_same_bits(s["master"], t["master"])


def test_backward_never_waits_for_copies():
    device, _ = open_fake(delay_ms=20.0)
    model = build(torch.bfloat16)
    opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=64 * 1024, staging_slots=3, device=device)
    loss_of(model, 0).backward()
    assert device.trace.total_ms("main", "wait for gradients") == 0
    assert device.trace.total_ms("compute", "slot for compute") < 5
    opt.step()
    assert device.trace.total_ms("main", "wait for gradients") > 15
    opt.close()


def test_spans_are_measured_on_the_streams():
    device, _ = open_fake(delay_ms=5.0, keep_spans=True)
    _, _, report = train(device, steps=2)
    assert report.copy_back_ms > 0
    spans = list(device.trace.spans)
    for lane, kind in [("compute", "pack"), ("down", "down"), ("up", "up"), ("compute", "copy back"), ("host", "adam")]:
        assert any(span.lane == lane and span.label.startswith(kind) for span in spans), kind
    ups = [span for span in spans if span.lane == "up"]
    assert all(span.stop_s - span.start_s >= 0.004 for span in ups)
    assert all(span.nbytes > 0 for span in ups)


# -- page-locked memory --------------------------------------------------------------------------------------------


def test_exactly_the_links_buffers_are_page_locked_and_at_their_exact_size():
    device, runtime = open_fake()
    p = torch.nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))
    opt = zofftk.OffloadAdamW([p], device=device)
    blocks = -(-100_000 // 4096)
    assert sorted(runtime.registered.values()) == [8 * blocks, 200_000]
    assert device.pinned.registered_bytes == 200_000 + 8 * blocks
    before = runtime.calls["hostRegister"]
    for _ in range(3):
        p.sum().backward()
        opt.step()
        opt.zero_grad()
    assert runtime.calls["hostRegister"] == before  # never in a hook or a step
    opt.close()


def test_it_is_given_back():
    device, runtime = open_fake()
    p = torch.nn.Parameter(torch.ones(5000))
    opt = zofftk.OffloadAdamW([p], device=device)
    p.sum().backward()
    opt.step()
    opt.close()
    del opt, device, p
    gc.collect()
    assert runtime.registered == {}


@pytest.mark.parametrize("limit", [{"register_limit": 0}, {"register_limit": 1000}, {"pinned_bytes": 0}])
def test_b25_pageable_memory_has_the_same_bits_and_one_warning(limit, caplog):
    device, runtime = open_fake(**limit)
    params, _, _ = train(device)
    expected, _, _ = train()
    for p, q in zip(params, expected, strict=True):
        assert_same_bits(p, q)
    warnings = [record.message for record in caplog.records if "page-locked" in record.message]
    assert len(warnings) == 1
    assert "stay pageable" in warnings[0]
    assert ("pinned_bytes allows 0" if "pinned_bytes" in limit else "out of memory") in warnings[0]
    assert sum(runtime.registered.values()) <= limit.get("register_limit", 0)


def test_b25_no_bytes_need_no_call():
    runtime = FakeRuntime()
    assert PinnedMemory(runtime, None).allocate(0).numel() == 0
    assert runtime.calls["hostRegister"] == 0


def test_b24_nothing_is_rounded_up():
    runtime = FakeRuntime()
    memory = PinnedMemory(runtime, None)
    mib = 1 << 20
    buffers = [memory.allocate(size) for size in [9 * mib] * 5 + [3 * mib + 1]]
    assert memory.registered_bytes == sum(buffer.numel() for buffer in buffers) == 48 * mib + 1


def test_what_a_freed_buffer_took_of_the_bound_is_free_again(caplog):
    runtime = FakeRuntime()
    memory = PinnedMemory(runtime, 10_000)
    for _ in range(3):
        buffer = memory.allocate(8000)[5:]
        assert memory.registered_bytes == sum(runtime.registered.values()) == 8000
        del buffer
        assert memory.registered_bytes == 0
    assert memory.refused_bytes == 0
    assert not caplog.records


def test_a_buffer_that_cannot_be_unregistered_is_not_counted_for_ever(monkeypatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(runtime, "hostUnregister", lambda pointer: 1 / 0)
    memory = PinnedMemory(runtime, None)
    memory.allocate(8000)
    assert memory.registered_bytes == 0


# -- faults and the end --------------------------------------------------------------------------------------------


def test_a_failing_copy_reaches_the_training_thread():
    device, runtime = open_fake()
    p = torch.nn.Parameter(torch.ones(5000))
    opt = zofftk.OffloadAdamW([p], device=device)
    runtime.fail_copies = True
    p.sum().backward()
    with pytest.raises(FakeError, match="cudaErrorIllegalAddress"):
        opt.step()
    device.close()


def test_close_destroys_streams_and_later_use_says_so():
    device, runtime = open_fake()
    assert len(runtime._streams) == 2
    device.close()
    device.close()
    assert runtime._streams == {}
    with pytest.raises(RuntimeError, match="closed"):
        device.record("down")
    assert not any(thread.name.startswith("fake-stream") for thread in threading.enumerate())


def test_events_are_destroyed():
    device, runtime = open_fake()
    train(device, steps=2)
    gc.collect()
    assert runtime.calls["eventDestroy"] > 20


def test_an_event_that_cannot_be_destroyed_says_nothing(monkeypatch):
    device, runtime = open_fake()
    said = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    monkeypatch.setattr(runtime, "eventDestroy", lambda event: 1 / 0)  # as at exit, where the driver has gone before
    event = device.record("down")
    device.synchronize(event, "down")
    assert event.handle.event is not None
    del event
    gc.collect()
    device.close()
    assert said == []


@pytest.mark.parametrize("when", ["backward", "step", "early step", "never"])
def test_dropping_everything_with_copies_under_way_waits_for_them(when):
    device, runtime = open_fake(delay_ms=20.0)
    model = build(torch.bfloat16)
    opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=16 * 1024, device=device)
    if when == "early step":
        zofftk.offload(model, opt)
    if when != "never":
        loss_of(model, 0).backward()
        opt._engine.close_round()
    if "step" in when:
        opt.step()
    del opt, model, device
    gc.collect()
    assert runtime.num_streams == 0
    assert not runtime.registered
    assert runtime.calls["copies of unregistered memory"] == 0
    assert bool(runtime.calls["memcpyAsync"]) == (when != "never")


def test_a_collection_on_one_of_the_devices_own_threads():
    """It cannot wait for itself: another thread closes the device, and holds the memory until then."""
    device, runtime = open_fake(delay_ms=5.0)
    model = build(torch.bfloat16)
    opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=16 * 1024, device=device)
    loss_of(model, 0).backward()
    gc.disable()
    try:
        cycle = [opt]
        cycle.append(cycle)
        device._enqueue("host", gc.collect)
        device._enqueue("down", lambda: None)
        del opt, cycle, device, model
        for _ in range(200):
            if runtime.num_streams == 0:
                break
            time.sleep(0.02)
    finally:
        gc.enable()
    assert runtime.num_streams == 0
    assert runtime.calls["copies of unregistered memory"] == 0
