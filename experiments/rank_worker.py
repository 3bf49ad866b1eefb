"""One rank of `scaling_measured`: trains a fixed model in a process of its own and says what that took."""

import multiprocessing
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zofftk
from zofftk.device.emulated import EmulatedDevice
from zofftk.trace import Span

STAGES = {
    "reduce-scatter": ("comm", "reduce-scatter"),
    "down": ("down", "down"),
    "Adam": ("host", "adam"),
    "up": ("up", "up"),
    "all-gather": ("comm", "all-gather"),
}


@dataclass(frozen=True)
class Task:
    layers: int
    width: int
    steps: int
    backwards: int
    backend: str


def run_on(size: int, task: Task, meeting: str) -> list[dict[str, Any]]:
    """What each of `size` ranks has measured; they meet at the file `meeting`."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(size) as pool:
        return pool.starmap(_rank, [(rank, size, task, meeting) for rank in range(size)], chunksize=1)


def _rank(rank: int, size: int, task: Task, meeting: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    is_gpu = task.backend == "nccl"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(meeting, size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(task.backend, store=store, rank=rank, world_size=size)
    try:
        return measure(rank, task, device)
    finally:
        dist.destroy_process_group()


def measure(rank: int, task: Task, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(task.width, task.width) for _ in range(task.layers)]
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    machine: dict[str, Any] = {} if device.type == "cuda" else {"device": EmulatedDevice(keep_spans=True)}
    opt = zofftk.OffloadAdamW(model.parameters(), trace=True, threads=1, **machine)
    torch.manual_seed(1 + rank)
    batch = torch.randn(64, task.width, device=device, dtype=torch.bfloat16)
    _step(model, opt, batch, task.backwards)
    before = opt.report()
    opt.trace.spans.clear()
    for _ in range(task.steps):
        _step(model, opt, batch, task.backwards)
    after = opt.report()
    spans = list(opt.trace.spans)
    result = _bytes(opt, task) | {
        "num_params": after.num_params,
        "staging_bytes": after.staging_bytes,
        "down_bytes": (after.bytes_down - before.bytes_down) / task.steps,
        "up_bytes": (after.bytes_up - before.bytes_up) / task.steps,
        "told_bytes": sum(span.nbytes for span in spans if _is_told(span)) / task.steps,
        "ms": {name: 1e3 * _total_s(spans, *place) / task.steps for name, place in STAGES.items()}
        | {"backward": 1e3 * _total_s(spans, "training", "backward") / task.steps},
        "hidden_share": hidden_share(spans),
    }
    opt.close()
    return result


def _step(model: nn.Module, opt: zofftk.OffloadAdamW, batch: torch.Tensor, backwards: int) -> None:
    for _ in range(backwards):
        loss = model(batch).float().square().mean()
        with opt.trace.span("training", "backward"):
            loss.backward()
    opt.step()
    opt.zero_grad()


def _bytes(opt: zofftk.OffloadAdamW, task: Task) -> dict[str, float]:
    """Of one rank, from the sizes of its buffers."""
    buckets = opt._require_engine().buckets
    totals = sum(bucket.total.nbytes for bucket in buckets if bucket.total is not None)
    moved = sum(run.numel for bucket in buckets for run in bucket.runs(bucket.params))
    held = sum(piece.numel for bucket in buckets for piece in bucket.shard.pieces)
    return {
        "state_bytes": opt.report().host_bytes - totals,  # which are there for a second backward
        "padding_bytes": 2 * (moved - held) * (task.backwards + 1),
    }


def _is_told(span: Span) -> bool:
    """What crosses the link beside gradients and values."""
    return (span.lane in ("down", "up") and ": bucket" not in span.label) or "statistics" in span.label


def _total_s(spans: list[Span], lane: str, kind: str) -> float:
    return sum(
        span.stop_s - span.start_s
        for span in spans
        if span.lane == lane
        and span.label.partition(":")[0] == kind
        and (": bucket" in span.label or lane == "training")
    )


def hidden_share(spans: list[Span]) -> float:
    """Of the time of all reduce-scatters, what lies inside a backward."""
    backwards = [span for span in spans if span.label == "backward"]
    total = inside = 0.0
    for span in spans:
        if span.label.startswith("reduce-scatter"):
            total += span.stop_s - span.start_s
            inside += sum(max(0.0, min(span.stop_s, b.stop_s) - max(span.start_s, b.start_s)) for b in backwards)
    return inside / total if total else 0.0
