"""CPU Adam against torch's AdamW, DeepSpeed's and the memory roof: one process, interleaved repetitions.

A step here has bfloat16 gradients and bfloat16 parameters, float32 masters and moments: 28 bytes per parameter. torch's
optimizers know float32 only, so that the fair competitor is the fused one plus the two casts around it. The roof is the
fastest loop that moves the same bytes and computes nothing.
"""

import argparse
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from zofftk import _cpu_adam
from zofftk.atomic_file import replacing
from zofftk.cpu_adam import adamw_step
from zofftk.errors import InputError
from zofftk.host_memory import usable_memory
from zofftk.isa import check_isa
from zofftk.outputs import check_file
from zofftk.threads import usable_threads
from zofftk.whole_number import at_least_1

HUGE_PAGE = 1 << 21
OPTIONS: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
# Threads of an OpenMP runtime spin for milliseconds after their last work, here the reset; whoever comes next must
# find the cores free.
SPIN_S = 0.05
NOISY_SPREAD = 0.25
BYTES_PER_PARAM = 30  # the buffers, and what torch's loops allocate in passing
MOST_THREADS = 1024
OURS, FUSED_AND_CASTS = "zofftk", "torch fused + 2 casts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``zofftk bench cpu-adam``."""
    parser.add_argument("--numel", type=_numel, nargs="+", default=[64_000_000], help="parameters (default: 64e6)")
    parser.add_argument("--repeats", type=at_least_1, default=9, help="timed turns of each competitor (default: 9)")
    parser.add_argument("--threads", type=_threads, help="threads for all (default: all this process may use)")
    parser.add_argument("--json", type=Path, default=None, help="write every raw sample and the environment here")


def _numel(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 32 <= value < 2**40:
        raise argparse.ArgumentTypeError(f"expected a number of 32 or more, got {text}")
    return int(value)


def _threads(text: str) -> int:
    if (value := at_least_1(text)) > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_THREADS}, got {text}")
    return value


def _check(args: argparse.Namespace) -> None:
    """Raises InputError for what would fail only after minutes of measuring."""
    check_isa()
    if args.json is not None:
        if not args.json.absolute().parent.is_dir():
            raise InputError(f"--json: expected a file in a folder that exists, got {args.json}")
        check_file(args.json, "--json")
    needed, usable = max(args.numel) * BYTES_PER_PARAM / 2**30, usable_memory() / 2**30
    if needed > usable:
        raise InputError(f"--numel: expected at most {usable:.1f} GiB of memory, {max(args.numel)} needs {needed:.1f}")


def run(args: argparse.Namespace) -> int:
    """Time every competitor at every size, print a table each and write the record; returns the exit code."""
    _check(args)
    threads = args.threads or usable_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    console = Console()
    results = []
    try:
        for numel in args.numel:
            result = measure(numel, threads, args.repeats)
            results.append(result)
            console.print(_table(result, threads))
            if (spread := _spread(result["seconds"][OURS])) > NOISY_SPREAD:
                note = f"the middle half of zofftk's samples spreads over {spread:.0%}: the machine is busy, repeat"
                console.print(note, highlight=False)
            for name, reason in result["unavailable"].items():
                console.print(f"{name}: not measured: {reason}", highlight=False)
    finally:
        torch.set_num_threads(before)
    if args.json is not None:
        text = json.dumps(dict(environment=environment(threads), results=results), indent=1) + "\n"
        with replacing(args.json) as file:
            file.write(text.encode())
    return 0


def environment(threads: int) -> dict[str, Any]:
    """What a reader needs to judge the samples."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return dict(
        cpu=next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
        ),
        cores=os.cpu_count(),
        threads=threads,
        isa=_cpu_adam.isa(),
        page_bytes=mmap.PAGESIZE,
        transparent_huge_pages=huge.read_text().strip() if huge.exists() else None,
        python=platform.python_version(),
        torch=torch.__version__,
        system=platform.platform(),
    )


def huge_buffer(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor at a multiple of 2 MiB, on huge pages where the system grants them."""
    size = max(1, numel * dtype.itemsize)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has a huge page setting of its own, mostly off
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE
    return raw[start : start + numel * dtype.itemsize].view(dtype).zero_()


def competitors(numel: int, threads: int) -> tuple[dict[str, Callable[[], Any]], dict[str, str], Callable[[], None]]:
    """Functions of one step each, all on the same buffers; why others are missing; and a reset of the contents."""
    p, m, v, g32 = (huge_buffer(numel, torch.float32) for _ in range(4))
    g16 = huge_buffer(numel, torch.bfloat16)
    param = torch.nn.Parameter(p)
    param.grad = g32

    def torch_step(**kind: Any) -> Callable[[], Any]:
        optimizer = torch.optim.AdamW([param], **OPTIONS, **kind)
        optimizer.state[param] = dict(step=torch.tensor(10.0), exp_avg=m, exp_avg_sq=v)
        return optimizer.step

    fused = torch_step(fused=True)

    def fused_and_casts() -> None:
        g32.copy_(g16)
        fused()
        g16.copy_(p)

    def roof(kind: str) -> Callable[[], None]:
        half = g16.data_ptr()
        return lambda: _cpu_adam.roof(kind, p.data_ptr(), m.data_ptr(), v.data_ptr(), half, half, numel, threads)

    def reset() -> None:
        p.fill_(0.5)
        m.fill_(1e-3)
        v.fill_(1e-5)
        g32.fill_(1e-2)
        g16.fill_(1e-2)

    steps: dict[str, Callable[[], Any]] = {
        OURS: lambda: adamw_step(p, m, v, g16, step=11, out=g16, threads=threads, **OPTIONS),
        "torch loop": torch_step(foreach=False),
        "torch foreach": torch_step(foreach=True),
        "torch fused": fused,
        FUSED_AND_CASTS: fused_and_casts,
    }
    steps |= {f"roof {kind}": roof(kind) for kind in _cpu_adam.roof_kinds()}
    missing: dict[str, str] = {}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

        steps["DeepSpeedCPUAdam"] = DeepSpeedCPUAdam([param], adamw_mode=True, **OPTIONS).step
    except Exception as error:  # it builds a kernel here and now, which may fail in any way
        missing["DeepSpeedCPUAdam"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return steps, missing, reset


def measure(numel: int, threads: int, repeats: int) -> dict[str, Any]:
    """Seconds of every repetition of every competitor, taken in turns after one untimed round."""
    steps, missing, reset = competitors(numel, threads)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            reset()
            time.sleep(SPIN_S)
            start = time.perf_counter()
            step()
            if repeat > 0:
                samples[name].append(time.perf_counter() - start)
    return dict(numel=numel, seconds=samples, unavailable=missing)


def _spread(times: list[float]) -> float:
    """Distance of the quartiles over the median."""
    return _iqr(times) / statistics.median(times)


def _iqr(times: list[float]) -> float:
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return high - low


def _table(result: dict[str, Any], threads: int) -> Table:
    samples: dict[str, list[float]] = result["seconds"]
    median = {name: statistics.median(times) for name, times in samples.items()}
    roof = min(value for name, value in median.items() if name.startswith("roof"))
    title = f"one AdamW step, {result['numel']:,} parameters, {threads} threads, {_cpu_adam.isa()}"
    table = Table(
        title=title,
        caption="medians; Gp/s: 1e9 parameters a second; speed relative to torch loop, fused + 2 casts, roof",
    )
    for column in ("", "ms", "IQR", "Gp/s", "x loop", "x casts", "x roof"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for name, times in samples.items():
        table.add_row(
            name,
            f"{median[name] * 1e3:.2f}",
            f"{_iqr(times) * 1e3:.2f}",
            f"{result['numel'] / median[name] / 1e9:.3f}",
            f"{median['torch loop'] / median[name]:.2f}",
            f"{median[FUSED_AND_CASTS] / median[name]:.2f}",
            f"{roof / median[name]:.2f}",
        )
    return table
