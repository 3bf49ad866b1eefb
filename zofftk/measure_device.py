"""Measures how quickly a device computes, operation by operation, in forward and backward of real models.

Operations are counted as a dry run counts them, so what is found is what a dry run needs: the speed of products by
their intensity, that of fused attention, and the bandwidth that all else reaches. Timed within a model, because memory
that an operation gets afresh costs more than memory it has had before.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zofftk.errors import InputError
from zofftk.gpt import build_gpt
from zofftk.gpt_config import GPTConfig
from zofftk.host_memory import usable_memory
from zofftk.profile import Gpu
from zofftk.repeat import seconds_of
from zofftk.virtual.op_costs import OpCost, cost_of, tensors_in

GIB = 1 << 30
COPY_BYTES = 128 * 1024 * 1024
CUDA_RESERVED_GIB = 1.0
TINY_RUN = ("--preset", "tiny", "--steps", "5", "--name", "tiny")
HEAD_WIDTH = 64
FEWEST_PASSES, MODEL_S = 4, 3.0  # of each model; the first pass is not counted


@dataclass(frozen=True)
class Shape:
    """Of a model and its batch: large enough to be like those that are trained, small enough to be quick."""

    hidden: int
    samples: int
    seq: int
    vocab: int
    layers: int = 2


ON_CPU = (Shape(hidden=256, samples=16, seq=128, vocab=8192), Shape(hidden=512, samples=8, seq=256, vocab=8192))
ON_GPU = (Shape(hidden=1024, samples=8, seq=1024, vocab=50304), Shape(hidden=4096, samples=4, seq=1024, vocab=50304))


@dataclass(frozen=True)
class Timed:
    """An operation and how long it took."""

    cost: OpCost
    seconds: float


def measure_device(place: torch.device) -> Gpu:
    is_cuda = place.type == "cuda"
    half = torch.float16 if is_cuda and torch.cuda.get_device_capability(place) < (8, 0) else torch.bfloat16
    shapes = ON_GPU if is_cuda else ON_CPU
    narrow, wide = (time_models(shapes, dtype, place) for dtype in (half, torch.float32))
    one = torch.zeros(1, device=place)
    kernel_s = seconds_of(lambda: one.add_(1.0), place, calls=100)
    rate, half_intensity = fit_products(products_of(narrow))
    memory_gb_s = measure_memory_gb_s(place)
    memory_bytes = torch.cuda.get_device_properties(place).total_memory if is_cuda else usable_memory()
    return Gpu(
        memory_gib=memory_bytes / GIB,
        reserved_gib=CUDA_RESERVED_GIB if is_cuda else measure_reserved_bytes() / GIB,
        peak_16bit_tflops=rate / 1e12,
        peak_32bit_tflops=rate_of(products_of(wide), half_intensity) / 1e12,
        max_efficiency=1.0,
        half_intensity=half_intensity,
        memory_gb_s=memory_gb_s,
        memory_efficiency=min(1.0, bytes_per_s([*narrow, *wide], kernel_s) / 1e9 / memory_gb_s),
        kernel_us=kernel_s * 1e6,
        attention_tflops=rate_of(attention_of(narrow)) / 1e12,
        is_host=not is_cuda,
    )


def measure_reserved_bytes() -> int:
    """What a training on the CPU takes beside the model's and the engine's: what a tiny model's run takes in all."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "zofftk", "train", *TINY_RUN, "--out", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"expected a training to run, it ended with {done.returncode}: {done.stderr.strip()}")
        memory = json.loads((Path(folder) / "tiny" / "record.json").read_text())["memory"]
    if memory["before_bytes"] is None:
        return 0  # this system does not tell
    return memory["peak_bytes"] - memory["before_bytes"]


# -- models --------------------------------------------------------------------------------------------------------


def time_models(shapes: Sequence[Shape], dtype: torch.dtype, place: torch.device) -> list[Timed]:
    """Every operation of a step of each model, in the mean of its passes: what now and then takes longer counts."""
    return [timed for shape in shapes for timed in _time_model(shape, dtype, place)]


def _time_model(shape: Shape, dtype: torch.dtype, place: torch.device) -> list[Timed]:
    heads = max(1, shape.hidden // HEAD_WIDTH)
    config = GPTConfig(layers=shape.layers, hidden=shape.hidden, heads=heads, seq=shape.seq, vocab=shape.vocab)
    model = build_gpt(config, seed=0, dtype=dtype).to(place)
    words = torch.arange(shape.samples * shape.seq, device=place).reshape(shape.samples, -1) % shape.vocab
    passes: list[list[Timed]] = []
    start_s = time.perf_counter()
    while len(passes) < FEWEST_PASSES or time.perf_counter() - start_s < MODEL_S:
        model.zero_grad()
        with TimedOps(place) as ops:
            model(words, words).backward()
        passes.append(ops.timed)
    return [
        Timed(each[0].cost, statistics.fmean(timed.seconds for timed in each)) for each in zip(*passes[1:], strict=True)
    ]


class TimedOps(TorchDispatchMode):
    """Waits for each operation that is no view, and keeps its cost and time in `timed`."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self._is_cuda = place.type == "cuda"
        self.timed: list[Timed] = []

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        start_s = self._now_s()
        out = func(*args, **kwargs)
        seconds = self._now_s() - start_s
        read, made = list(tensors_in((args, kwargs))), list(tensors_in(out))
        known = {tensor.untyped_storage()._cdata for tensor in read}
        is_view = not func._schema.is_mutable and all(tensor.untyped_storage()._cdata in known for tensor in made)
        if not is_view and (cost := cost_of(func, args, kwargs, out, [*read, *made])) is not None:
            self.timed.append(Timed(cost, seconds))
        return out

    def _now_s(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


# -- numbers -------------------------------------------------------------------------------------------------------


def products_of(timed: Sequence[Timed]) -> list[Timed]:
    return [each for each in timed if each.cost.flops and not each.cost.is_attention]


def attention_of(timed: Sequence[Timed]) -> list[Timed]:
    return [each for each in timed if each.cost.is_attention]


def fit_products(products: Sequence[Timed]) -> tuple[float, float]:
    """Floating-point operations a second that ever larger products tend to, and the intensity of half of it.

    A product takes (flops + half_intensity * elements) / rate, as `Durations.compute_ns` has it: a straight line, laid
    so that long products count by their time. Where those of low intensity are no slower, half_intensity is 0.
    """
    flops, elements, seconds = (
        np.array(values, dtype=np.float64)
        for values in zip(*((each.cost.flops, each.cost.elements, each.seconds) for each in products), strict=True)
    )
    weights = 1.0 / np.sqrt(seconds)
    columns = np.stack([flops, elements], axis=1) * weights[:, None]
    per_flop, per_element = np.linalg.lstsq(columns, seconds * weights, rcond=None)[0]
    if per_flop <= 0 or per_element <= 0:
        return float(flops.sum() / seconds.sum()), 0.0
    return float(1.0 / per_flop), float(per_element / per_flop)


def rate_of(timed: Sequence[Timed], half_intensity: float = 0.0) -> float:
    """Floating-point operations a second that these tend to, if that is the intensity of half of it."""
    work = sum(each.cost.flops + half_intensity * each.cost.elements for each in timed)
    return work / sum(each.seconds for each in timed)


def bytes_per_s(timed: Sequence[Timed], kernel_s: float) -> float:
    """That operations reach which only read and write."""
    moving = [each for each in timed if not each.cost.flops]
    return sum(each.cost.nbytes for each in moving) / sum(max(0.0, each.seconds - kernel_s) for each in moving)


def measure_memory_gb_s(place: torch.device) -> float:
    """Of a copy, bytes read and written."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source), place) / 1e9
