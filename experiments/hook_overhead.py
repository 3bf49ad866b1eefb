"""What the hooks cost the host in backward, per parameter, on a model of many small parameters."""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import closing

import torch

import zofftk
from experiments.record import keep
from experiments.verdict import verdict
from zofftk import hooks

ALLOWED_US = {"hooks": 5.0, "hooks and stand-in": 10.0}
NUMEL = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, default=1000, help="parameters of the model (default: 1000)")
    parser.add_argument("--repeats", type=int, default=60, help="turns of each kind of backward (default: 60)")


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    plain, taken, whole = (make_params(options.params) for _ in range(3))
    with closing(zofftk.OffloadAdamW(taken)) as taker, closing(zofftk.OffloadAdamW(whole)) as optimizer:
        leave_no_stand_in(taker)
        kinds: dict[str, tuple[list[torch.nn.Parameter], Callable[[], None]]] = {
            "no hooks": (plain, lambda: None),
            "hooks": (taken, taker.zero_grad),
            "hooks and stand-in": (whole, lambda: step_and_clear(optimizer)),
        }
        samples: dict[str, list[float]] = {name: [] for name in kinds}
        gc.disable()
        for _ in range(options.repeats):
            for name, (params, after) in kinds.items():
                samples[name].append(1e6 * timed_backward(params) / len(params))
                after()
        gc.enable()
    results = compare(samples)
    for name, value in results.items():
        print(f"{name:45}{value:7.2f} us per parameter")
    met = {name: results[f"{name}, over no hooks"] <= limit for name, limit in ALLOWED_US.items()}
    for name, limit in ALLOWED_US.items():
        print(f"required: {name} at most {limit} us over no hooks: {verdict(met[name])}")
    print("record:", keep("hook_overhead", vars(options) | {"run": None}, samples, results))
    return 0 if all(met.values()) else 1


def compare(samples: dict[str, list[float]]) -> dict[str, float]:
    """Medians, and the median over the turns of what a kind takes longer than no hooks in the same turn."""
    medians = {name: statistics.median(values) for name, values in samples.items()}
    extra = {
        f"{name}, over no hooks": statistics.median(
            value - base for value, base in zip(samples[name], samples["no hooks"], strict=True)
        )
        for name in ALLOWED_US
    }
    return medians | extra


def step_and_clear(optimizer: zofftk.OffloadAdamW) -> None:
    optimizer.step()
    optimizer.zero_grad()


def make_params(number: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(NUMEL)) for _ in range(number)]


def leave_no_stand_in(optimizer: zofftk.OffloadAdamW) -> None:
    """The hooks do all their work, but `p.grad` is left empty."""
    engine = optimizer._require_engine()
    for hook in optimizer._stand_ins.hooks.values():
        hook.remove()
    nothing: list[torch.Tensor | None] = [None] * len(engine.managed)
    for managed in engine.managed:
        hook = hooks.attach(engine, managed.index, managed.tensor, nothing)
        optimizer._stand_ins.hooks[managed.index] = hook


def timed_backward(params: list[torch.nn.Parameter]) -> float:
    """Seconds of a backward and of letting go of its gradients, which the hooks do during backward."""
    loss = torch.stack([param.sum() for param in params]).sum()
    began = time.perf_counter()
    loss.backward()
    for param in params:
        param.grad = None
    return time.perf_counter() - began
