"""What the GPU path reaches on this card: kernels, copies, and training steps, against the plain ways of doing them."""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.record import keep
from experiments.torch_timer import DeviceTimer
from experiments.verdict import verdict
from zofftk.triton_kernels import BLOCK_NUMEL, CopyBackPlan, PackPlan, Span, count_blocks  # pyright: ignore

REQUIRED = {
    "pack over the card's copy bandwidth": 0.85,
    "copy back over the card's copy bandwidth": 0.85,
    "pack over the foreach calls it replaces": 1.0,
    "copy back over the foreach calls it replaces": 1.0,
    "down over a plain page-locked copy": 0.9,
    "up over a plain page-locked copy": 0.9,
}
GPT_SHAPES = [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096), (4096,), (4096,), (12288,), (16384,)]
COPY_BYTES = 1 << 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="kernels, copies and two steps of a 1B model only")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=int, default=1, help=argparse.SUPPRESS)  # divides every size, to try it out


def run(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: expected a CUDA GPU that torch can use, got none; see `zofftk doctor`", file=sys.stderr)
        return 2
    timer = DeviceTimer(device)
    results = measure_kernels(device, timer, options.scale) | measure_copies(device, timer, options.scale)
    for name, value in results.items():
        print(f"{name:48}{value:10.3f}")
    met = {name: results[name] >= least for name, least in REQUIRED.items()}
    for name, least in REQUIRED.items():
        print(f"required: {name} at least {least}: {verdict(met[name])}")
    steps = []
    for preset, count in [("1b", 2)] if options.quick else [("1b", 5), ("4b", 3)]:
        steps += [measure_steps(side, preset, count, options) for side in ("zofftk", "torchao", "deepspeed")]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    config = {"quick": options.quick, "card": name, "scale": options.scale}
    print("record:", keep("gpu_check", config, steps, results))
    return 0 if all(met.values()) else 1


# -- kernels -------------------------------------------------------------------------------------------------------


def measure_kernels(device: torch.device, timer: DeviceTimer, scale: int) -> dict[str, float]:
    tensors = [
        torch.randn(shape[0] // scale, *shape[1:], device=device, dtype=torch.bfloat16) for shape in GPT_SHAPES * 2
    ]
    spans, offset, block = [], 0, 0
    for tensor in tensors:
        spans.append(Span(0, tensor.numel(), offset, block))
        offset += -(-tensor.numel() // 64) * 64
        block += count_blocks(tensor.numel())
    flat = torch.zeros(offset, device=device, dtype=torch.bfloat16)
    sums = torch.zeros(block, device=device, dtype=torch.float64)
    views = [flat[span.offset : span.offset + span.numel].view(t.shape) for span, t in zip(spans, tensors, strict=True)]
    dtypes = [tensor.dtype for tensor in tensors]
    pack, copy_back = PackPlan(spans, dtypes, device), CopyBackPlan(spans, dtypes, device)
    whole, other = torch.empty_like(flat), torch.empty_like(flat)

    def foreach_pack() -> None:
        torch.ops.aten._foreach_copy_(views, tensors)
        norms = torch.ops.aten._foreach_norm(tensors, 2)
        torch.isfinite(torch.stack(list(norms))).all()

    timed = timer.in_turns(
        {
            "copy": lambda: whole.copy_(other),
            "pack": lambda: pack(tensors, flat, sums),
            "pack by foreach": foreach_pack,
            "copy back": lambda: copy_back(flat, tensors),
            "copy back by foreach": lambda: torch.ops.aten._foreach_copy_(tensors, views),
        }
    )
    seconds = {name: statistics.median(values) for name, values in timed.items()}
    return {
        "copy bandwidth, read + write, GB/s": 2 * flat.nbytes / seconds["copy"] / 1e9,
        "pack over the card's copy bandwidth": seconds["copy"] / seconds["pack"],
        "copy back over the card's copy bandwidth": seconds["copy"] / seconds["copy back"],
        "pack over the foreach calls it replaces": seconds["pack by foreach"] / seconds["pack"],
        "copy back over the foreach calls it replaces": seconds["copy back by foreach"] / seconds["copy back"],
    }


# -- copies --------------------------------------------------------------------------------------------------------


def measure_copies(device: torch.device, timer: DeviceTimer, scale: int) -> dict[str, float]:
    """The engine's own down and up, bucket by bucket, against one plain copy of the same bytes."""
    from zofftk.config import OffloadConfig
    from zofftk.device.base import DOWN, UP, Run
    from zofftk.device.opening import open_device

    machine = open_device(device, OffloadConfig())
    numel = COPY_BYTES // scale // 2
    slot = machine.buffer("slot", numel, torch.bfloat16, "device")
    wire = machine.buffer("wire", numel, torch.bfloat16, "host", on_link=True)
    plain_host = torch.empty(numel, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    plain_dev = torch.empty(numel, dtype=torch.bfloat16, device=device)
    bucket = max(BLOCK_NUMEL, (16 << 20) // 2)
    runs = [Run(at, min(bucket, numel - at)) for at in range(0, numel, bucket)]

    def down() -> None:
        machine.copy_down("down", wire, slot, runs)
        machine.synchronize(machine.record(DOWN), "down")

    def up() -> None:
        machine.wait(UP, machine.record(DOWN), "down")
        machine.copy_up("up", slot, wire, runs)
        machine.synchronize(machine.record(UP), "up")
        machine.wait(DOWN, machine.record(UP), "up")

    timed = timer.in_turns(
        {
            "down": down,
            "plain down": lambda: plain_host.copy_(plain_dev, non_blocking=True),
            "up": up,
            "plain up": lambda: plain_dev.copy_(plain_host, non_blocking=True),
        },
        on_host=True,
    )
    machine.close()
    seconds = {name: statistics.median(values) for name, values in timed.items()}
    return {
        "plain copy down, GB/s": 2 * numel / seconds["plain down"] / 1e9,
        "down over a plain page-locked copy": seconds["plain down"] / seconds["down"],
        "plain copy up, GB/s": 2 * numel / seconds["plain up"] / 1e9,
        "up over a plain page-locked copy": seconds["plain up"] / seconds["up"],
    }


# -- training steps ------------------------------------------------------------------------------------------------


def measure_steps(side: str, preset: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of one optimizer in a process of its own, so that memory and libraries do not mix."""
    command = [sys.executable, "-m", "experiments.gpu_steps", side, preset, str(count), options.device]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    lines = done.stdout.strip().splitlines()
    text = lines[-1] if done.returncode == 0 and lines else f"not measured: {_last_line(done.stderr)}"
    print(f"{preset} {side}: {text}  ({time.perf_counter() - began:.0f} s in all)")
    return {"side": side, "preset": preset, "result": text}


def _last_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines() or ["no output"]
    return lines[-1][:200]
