"""What the engine may rely on, on every device that holds data."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from tests.compare import assert_same_bits
from tests.fake_cuda import FakeRuntime
from zofftk.device import host_kernels
from zofftk.device.base import COMM, COMPUTE, DOWN, HOST, UP, Placement, Run
from zofftk.device.clock import RaceError
from zofftk.device.cuda import CudaDevice, open_cuda_device
from zofftk.device.emulated import EmulatedDevice
from zofftk.layout import BLOCK_NUMEL, Piece


def fake_cuda(**options):
    """The CUDA device on threads that behave like CUDA streams."""
    runtime = FakeRuntime(**options)
    return CudaDevice(
        torch.device("cpu"),
        keep_spans=True,
        runtime=runtime,
        compute_stream=lambda: 0,
        kernels=host_kernels,
        on_stream=runtime.issue,
    )


DEVICES = {
    "cuda on a fake runtime": fake_cuda,
    "cuda on a slow fake runtime": lambda: fake_cuda(delay_ms=3.0),
    "emulated": lambda: EmulatedDevice(keep_spans=True, poison=True),
    "emulated with delays": lambda: EmulatedDevice(keep_spans=True, poison=True, delays=7, max_delay_ms=2.0),
}


def real_cuda():
    return open_cuda_device(torch.device("cuda"), keep_spans=True, pinned_bytes=None)


@pytest.fixture(
    params=[
        *sorted(DEVICES),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
            ],
        ),
    ]
)
def device(request, no_threads_left):
    device = {**DEVICES, "cuda": real_cuda}[request.param]()
    yield device
    device.close()


def on(device, tensor):
    """The tensor where the device's compute works, with its strides."""
    return tensor.to(getattr(device, "_device", "cpu"))


def fill(device, buffer, values):
    device.host_task("fill", lambda: buffer.tensor.copy_(values), writes=[buffer])


def test_a_round_trip_through_the_link(device):
    tensors = [
        torch.randn(300),
        torch.randn(7, 11).t(),
        torch.randn(0),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    tensors = [on(device, tensor) for tensor in tensors]
    pieces, offset = [], 64
    for tensor in tensors:
        pieces.append(Piece(0, 0, tensor.numel(), offset, len(pieces)))
        offset += tensor.numel() + 3
    placement = Placement(pieces)
    slot = device.buffer("slot", offset, torch.float32, "device")
    sums = device.buffer("sums", len(pieces), torch.float64, "device")
    wire = device.buffer("wire", offset, torch.float32, "host")
    runs = [Run(piece.offset, piece.numel) for piece in pieces if piece.numel]
    device.pack("pack", placement, tensors, slot, sums)
    device.wait(DOWN, device.record(COMPUTE), "packed")
    device.copy_down("down", wire, slot, runs)
    device.wait(HOST, device.record(DOWN), "arrived")
    device.host_task("double", lambda: wire.tensor.mul_(2.0), writes=[wire])
    device.wait(UP, device.record(HOST), "doubled")
    device.copy_up("up", slot, wire, runs)
    device.wait(COMPUTE, device.record(UP), "landed")
    expected = [tensor * 2 for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    device.copy_back("back", slot, placement, tensors)
    for tensor, value, version in zip(tensors, expected, versions, strict=True):
        assert_same_bits(tensor, value)
        assert tensor._version > version
    assert device.bytes_down == device.bytes_up == 4 * sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
def test_pack_casts_and_sums(device, wire):
    tensor = on(device, torch.randn(2 * BLOCK_NUMEL + 100))
    slot = device.buffer("slot", tensor.numel(), wire, "device")
    sums = device.buffer("sums", 3, torch.float64, "device")
    device.pack("pack", Placement([Piece(0, 0, tensor.numel(), 0, 0)]), [tensor], slot, sums)
    assert_same_bits(slot.tensor, tensor.to(wire))
    expected = [part.double().square().sum().item() for part in tensor.to(wire).split(BLOCK_NUMEL)]
    assert sums.tensor.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_part_of_a_strided_tensor_comes_back_in_its_place(device):
    tensor = on(device, torch.zeros(30, 20).t())
    slot = device.buffer("slot", 200, torch.float32, "device")
    sums = device.buffer("sums", 1, torch.float64, "device")
    placement = Placement([Piece(0, 100, 300, 0, 0)])
    device.pack("pack", placement, [on(device, torch.arange(600.0))], slot, sums)
    device.copy_back("back", slot, placement, [tensor])
    expected = torch.zeros(600)
    expected[100:300] = torch.arange(100.0, 300.0)
    assert_same_bits(tensor.cpu(), expected.view(20, 30))


def test_a_stream_works_in_order_and_streams_work_side_by_side(device):
    order = []
    started = threading.Event()
    device.host_task("first", lambda: (started.wait(), order.append("first")))
    device.host_task("second", lambda: order.append("second"))
    source = device.buffer("source", 8, torch.uint8, "device")
    target = device.buffer("target", 8, torch.uint8, "host")
    device.copy_down("down", target, source, [Run(0, 8)])
    device.synchronize(device.record(DOWN), "down is not held up by host")
    assert order == []
    started.set()
    device.synchronize(device.record(HOST), "host")
    assert order == ["first", "second"]


def test_an_event_holds_a_stream_back(device):
    buffer = device.buffer("values", 1000, torch.float32, "host")
    slot = device.buffer("slot", 1000, torch.float32, "device")
    device.host_task("fill", lambda: (time.sleep(0.05), buffer.tensor.fill_(3.0)), writes=[buffer])
    device.wait(UP, device.record(HOST), "filled")
    device.copy_up("up", slot, buffer, [Run(0, 1000)])
    device.synchronize(device.record(UP), "landed")
    assert_same_bits(slot.tensor.cpu(), torch.full((1000,), 3.0))


def test_a_missing_wait_fails_at_once(device):
    buffer = device.buffer("values", 10, torch.float32, "host")
    slot = device.buffer("slot", 10, torch.float32, "device")
    fill(device, buffer, torch.ones(10))
    with pytest.raises(RaceError, match="'up' on up reads values, which 'fill' on host has written"):
        device.copy_up("up", slot, buffer, [Run(0, 10)])
    with pytest.raises(RaceError, match="'look' on main reads values, which 'fill' on host has written"):
        device.value("look", buffer)


def test_an_exception_in_a_stream_reaches_the_caller_with_its_own_traceback(device):
    def fails():
        raise KeyError("inside the host stream")

    device.host_task("fails", fails)
    with pytest.raises(KeyError, match="inside the host stream") as caught:
        device.synchronize(device.record(HOST), "wait")
    assert any(entry.name == "fails" for entry in caught.traceback)
    with pytest.raises(RuntimeError, match="stopped at an earlier fault: KeyError: 'inside the host stream'"):
        device.host_task("more", lambda: None)


def test_close_ends_its_threads_and_later_use_says_so(device):
    device.close()
    device.close()
    with pytest.raises(RuntimeError, match="closed"):
        device.host_task("late", lambda: None)


def test_a_forked_child_is_told(device):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            device.host_task("in the child", lambda: None)
        except RuntimeError as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"fork" in os.read(read_end, 1000)
    device.synchronize(device.record(HOST), "the parent is unharmed")


def test_collectives_have_a_stream_of_their_own(device):
    device.open_comm()
    slot = device.buffer("slot", 8, torch.float32, "device")
    wire = device.buffer("wire", 4, torch.float32, "host")
    device.zero("zero", slot)
    device.wait(COMM, device.record(COMPUTE), "zeroed")
    own = slot.part(4, 4)
    device.collective("add", lambda part, whole: part.copy_(whole[:4] + 2.0), own, slot)
    with pytest.raises(RaceError, match="'down' on down reads slot, which 'add' on comm has written"):
        device.copy_down("down", wire, own, [Run(0, 4)])
    device.wait(DOWN, device.record(COMM), "added")
    device.copy_down("down again", wire, own, [Run(0, 4)])
    device.synchronize(device.record(DOWN), "wait")
    assert wire.tensor.tolist() == [2.0] * 4


def test_bandwidth_caps_stretch_copies(no_threads_left):
    device = EmulatedDevice(keep_spans=True, down_gb_s=0.1)
    source = device.buffer("source", 2_000_000, torch.uint8, "device")
    target = device.buffer("target", 2_000_000, torch.uint8, "host")
    device.copy_down("down", target, source, [Run(0, 2_000_000)])
    device.synchronize(device.record(DOWN), "wait")
    span = device.trace.spans[0]
    assert span.nbytes == 2_000_000
    assert 0.02 <= span.stop_s - span.start_s < 0.2
    device.close()
