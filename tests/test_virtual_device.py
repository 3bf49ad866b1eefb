"""The engine on a virtual clock: its operations are those of a machine with data, its times are sums."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import zofftk
from tests.small_gpt import SmallGPT, loss_of
from zofftk.device.base import COMM, COMPUTE, DOWN, HOST, UP, Placement, Run
from zofftk.device.clock import RaceError
from zofftk.device.emulated import EmulatedDevice
from zofftk.device.virtual import VirtualDevice
from zofftk.layout import Piece
from zofftk.profile import load_profile
from zofftk.virtual.durations import Durations
from zofftk.virtual.fake_model import build_fake
from zofftk.virtual.rehearsal import Rehearsal


class Units:
    """Durations that are easy to add up: a nanosecond a byte, or an element, and what else is written here."""

    shares_cores = False

    def copy_ns(self, stream, nbytes, copies):
        return nbytes + 1000 * copies

    def move_ns(self, nbytes):
        return nbytes

    def host_ns(self, work):
        return work.updates or 10 * work.nbytes

    def collective_ns(self, nbytes, parts):
        return nbytes * parts


def device(**options):
    return VirtualDevice(Units(), keep_spans=True, **options)


def buffer(device, name, numel, place, dtype=torch.uint8):
    return device.buffer(name, numel, dtype, place, on_link=place == "host")


def test_streams_run_side_by_side_and_wait_for_events():
    virtual = device()
    slot, wire = buffer(virtual, "slot", 50, "device"), buffer(virtual, "wire", 50, "host")
    virtual.compute("model", 300)
    assert (virtual.now_ns(COMPUTE), virtual.now_ns(DOWN)) == (300, 0)
    virtual.wait(DOWN, virtual.record(COMPUTE), "made")
    virtual.copy_down("down", wire, slot, [Run(0, 20), Run(30, 20)])
    assert virtual.now_ns(DOWN) == 300 + 40 + 2000
    virtual.wait(HOST, virtual.record(DOWN), "arrived")
    virtual.host_task("double", lambda: None, writes=[wire])
    assert virtual.now_ns(HOST) == 2340 + 500
    virtual.host_task("adam", lambda: None, writes=[wire], updates=7)
    assert virtual.now_ns(HOST) == 2847
    assert virtual.now_ns(COMPUTE) == 300
    assert virtual.bytes_down == 40
    virtual.synchronize(virtual.record(HOST), "all")
    virtual.compute("model", 1)
    assert virtual.now_ns(COMPUTE) == 2848  # nothing begins before it is enqueued
    assert virtual.busy_ns == {COMPUTE: 301, DOWN: 2040, HOST: 507}


def test_a_model_s_work_is_one_span_until_something_comes_between():
    virtual = device()
    slot = buffer(virtual, "slot", 5, "device")
    for label, duration in [("forward", 10), ("forward", 20), ("backward", 5)]:
        virtual.compute(label, duration)
    virtual.zero("zero", slot)
    virtual.compute("backward", 7)
    virtual.collect_spans()
    spans = [(span.label, round(span.start_s * 1e9), round(span.stop_s * 1e9)) for span in virtual.trace.spans]
    assert spans == [("forward", 0, 30), ("backward", 30, 35), ("zero", 35, 40), ("backward", 40, 47)]


def test_collectives_take_as_long_as_all_parts():
    virtual = device()
    virtual.open_comm()
    whole = buffer(virtual, "whole", 80, "device")
    virtual.collective("all-gather", lambda into, part: None, whole, whole.part(0, 20))
    assert virtual.now_ns(COMM) == 80 * 4
    assert virtual.bytes_between == 60


def test_memory_is_counted_by_place():
    virtual = device()
    buffer(virtual, "slot", 3, "device", torch.float32)
    buffer(virtual, "wire", 5, "host", torch.bfloat16)
    virtual.buffer("master", 7, torch.float32, "host")
    assert virtual.allocated_bytes == {"device": 12, "host": 10 + 28}
    assert virtual.locked_bytes == 10


def test_pack_moves_versions_and_missing_waits_fail():
    virtual, tensor = device(), torch.zeros(6)
    slot, sums = buffer(virtual, "slot", 6, "device", torch.bfloat16), buffer(virtual, "sums", 1, "device")
    placement = Placement([Piece(0, 0, 6, 0, 0)])
    virtual.pack("pack", placement, [tensor], slot, sums)
    assert virtual.now_ns(COMPUTE) == 6 * (4 + 2)
    before = tensor._version
    virtual.copy_back("copy back", slot, placement, [tensor])
    assert tensor._version > before
    with pytest.raises(RaceError, match="'up' on up writes slot"):
        virtual.copy_up("up", slot, buffer(virtual, "wire", 6, "host", torch.bfloat16), [Run(0, 6)])


PROGRAMS = {
    "synchronous": {},
    "clipped, small buckets": {"max_grad_norm": 1.0, "bucket_bytes": 16 * 1024},
    "delayed": {"update": "delayed", "delay_after": 1},
    "inside backward": {"update": "delayed", "delay_after": 1, "backwards_per_step": 1},
    "two backwards": {"backwards": 2},
    "overlapped": {"overlap": True},
    "overlapped, delayed": {"overlap": True, "update": "delayed", "delay_after": 1},
}


def train(model, device, loss, *, backwards=1, overlap=False, **options):
    optimizer = zofftk.OffloadAdamW(model.named_parameters(), device=device, **options)
    if overlap:
        zofftk.offload(model, optimizer)
    for _ in range(4):
        for _ in range(backwards):
            loss(model)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.close()


def labels(device):
    device.collect_spans()
    model = ("forward", "backward")
    lanes = {lane: [] for lane in ("main", COMPUTE, DOWN, UP, HOST)}
    for span in device.trace.spans:
        if span.label not in model:
            lanes[span.lane].append((span.label, span.nbytes))
    return lanes


@pytest.mark.parametrize("options", PROGRAMS.values(), ids=PROGRAMS)
def test_its_operations_are_those_of_the_emulated_device(options, no_threads_left):
    emulated = EmulatedDevice(keep_spans=True)
    torch.manual_seed(0)
    train(SmallGPT().bfloat16(), emulated, lambda model: loss_of(model, 0).backward(), **options)
    rehearsal = Rehearsal(
        SmallGPT,
        lambda model: loss_of(model, 0),
        Durations(load_profile("a100")),
        dtype=torch.bfloat16,
        keep_spans=True,
    )
    program = rehearsal.program
    train(rehearsal.model, rehearsal.device, lambda model: program.micro_batch(), **options)
    assert labels(rehearsal.device) == labels(emulated)
    assert rehearsal.device.bytes_down == emulated.bytes_down
    assert rehearsal.device.bytes_up == emulated.bytes_up


def test_a_model_that_fits_no_memory_here():
    fake, virtual, threads = FakeTensorMode(), device(), threading.active_count()
    model = build_fake(lambda: SmallGPT(vocab=50257, hidden=12288, layers=4, heads=96, seq=64), fake, torch.bfloat16)
    opt = zofftk.OffloadAdamW(model.parameters(), device=virtual, bucket_bytes=1 << 28, max_grad_norm=1.0)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        opt.step()
        opt.zero_grad()
    assert threading.active_count() == threads
    n = sum(p.numel() for p in model.parameters())
    assert n > 7.8e9
    assert opt.report().num_params == n
    assert virtual.bytes_up == pytest.approx(2 * 2 * n, rel=1e-3)
    assert virtual.bytes_down == pytest.approx(2 * 2 * n, rel=2e-3)
    assert virtual.allocated_bytes["host"] == pytest.approx(14 * n, rel=1e-3)
    assert virtual.locked_bytes == pytest.approx(2 * n, rel=2e-3)
    assert virtual.allocated_bytes["device"] < 3 * (1 << 28) * 1.01
