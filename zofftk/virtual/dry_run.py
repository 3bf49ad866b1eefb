"""A training step on a machine that nobody has at hand: its time, its memory and its traffic, by running it dry.

The engine, its policies and its optimizer are the real ones, on a virtual device; the model's operations run on fake
tensors, each for as long as the profile says. Layers that repeat are run a few times, and their events continued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zofftk.offload_adam import OffloadAdamW
from zofftk.optimizer import OffloadOptimizer
from zofftk.profile import Profile
from zofftk.ranks.slices import local_of, mesh_of
from zofftk.ranks.virtual_group import VirtualGroup
from zofftk.trace import Trace
from zofftk.virtual.counts import Counts
from zofftk.virtual.durations import Durations
from zofftk.virtual.program import Loss
from zofftk.virtual.rehearsal import Rehearsal

GIB = 1 << 30
MOST_STEPS = 12  # until a step takes as long as the one before
ALIKE_FROM = 3  # backwards of a step after which one more takes as long as the last


@dataclass(frozen=True)
class DeviceBytes:
    """What is on one device when most is, in bytes."""

    parameters: int  # and the model's buffers
    activations: int
    gradients: int
    engine: int  # staging slots, and what ranks tell each other
    reserved: int  # by the profile: no tensor can have it

    @property
    def total(self) -> int:
        return self.parameters + self.activations + self.gradients + self.engine + self.reserved


@dataclass(frozen=True)
class DryRun:
    """One step of one rank, after those before it have set the pace."""

    profile: Profile
    ranks: int
    slices: int
    num_params: int  # of this device
    step: Counts
    device: DeviceBytes
    host_bytes: int  # of this rank
    locked_bytes: int  # page-locked, of these
    is_stretched: bool  # few layers were run, and continued
    trace: Trace

    @property
    def step_ms(self) -> float:
        return self.step.ns / 1e6

    @property
    def tflops(self) -> float:
        """1e12 floating-point operations a second, recomputed ones included, of one device."""
        return self.step.flops / self.step.ns / 1e3

    @property
    def fits_device(self) -> bool:
        return self.device.total <= self.profile.gpu.memory_gib * GIB

    @property
    def fits_host(self) -> bool:
        """Together with the other ranks of its host."""
        ranks_here = Durations(self.profile, self.ranks, self.slices).ranks_here
        return self.host_bytes * ranks_here <= self.profile.host.memory_gib * GIB


def dry_run(
    build: Callable[[], nn.Module],
    loss: Loss,
    profile: Profile,
    *,
    optimizer: type[OffloadOptimizer] = OffloadAdamW,
    dtype: torch.dtype | None = torch.bfloat16,
    ranks: int = 1,
    slices: int = 1,
    backwards: int = 1,
    overlap: bool = False,
    in_full: bool = False,
    keep_spans: bool = False,
    **options: Any,
) -> DryRun:
    """Train a model of any size for a few steps on the machine of `profile`, without data.

    Args:
        build: makes the model; it is called under `torch.device("meta")`.
        loss: makes a batch, calls the model it is given, and returns the loss; it runs under fake tensors.
        profile: the machine, see `load_profile`.
        optimizer: the optimizer's class.
        dtype: of the floating-point parameters and buffers; None: as they are built.
        ranks: those that train on different data and share the states (ZeRO-2).
        slices: devices that each layer is cut over, for each of the ranks. Where it is not 1, `build` makes a model of
            DTensors on a mesh of as many devices, see `virtual_mesh`.
        backwards: micro-batches a step.
        overlap: hand the model over to `zofftk.offload`, so that the update hides behind the next forward.
        in_full: run every layer, also where they repeat.
        keep_spans: keep a span of every operation, in virtual time, in the result's `trace`.
        **options: of the optimizer. With `update="delayed"`, `delay_after` is 1 unless given: the step that is looked
            at is one of those that come late.

    Raises:
        ValueError: a number below 1; an option, or a model, that the optimizer does not take.
    """
    for name, value in (("ranks", ranks), ("slices", slices), ("backwards", backwards)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    durations = Durations(profile, ranks, slices)
    rehearsal = Rehearsal(build, loss, durations, dtype=dtype, in_full=in_full, keep_spans=keep_spans)
    _check_slices(list(rehearsal.program.params.values()), slices)
    return dry_run_of(rehearsal, optimizer=optimizer, backwards=backwards, overlap=overlap, **options)


def dry_run_of(
    rehearsal: Rehearsal,
    *,
    optimizer: type[OffloadOptimizer] = OffloadAdamW,
    backwards: int = 1,
    overlap: bool = False,
    **options: Any,
) -> DryRun:
    """Train what a rehearsal has on its device; arguments are as for `dry_run`."""
    with training(rehearsal, optimizer, overlap=overlap, **options) as opened:
        steps = steady_steps(rehearsal, opened, backwards, least=warm_up(opened, overlap))
    return _result(rehearsal, _one_step(steps, backwards))


@contextmanager
def training(
    rehearsal: Rehearsal, optimizer: type[OffloadOptimizer], *, overlap: bool, **options: Any
) -> Iterator[OffloadOptimizer]:
    """The optimizer of a rehearsal's parameters, until the end."""
    if options.get("update") == "delayed":
        options.setdefault("delay_after", 1)
    params, group = list(rehearsal.program.params.items()), VirtualGroup(rehearsal.durations.ranks)
    kind: Any = optimizer  # whose base class takes other arguments than those that are used
    opened: OffloadOptimizer = kind(params, device=rehearsal.device, process_group=group, **options)
    try:
        if overlap:
            rehearsal.program.overlap(opened)
        yield opened
    finally:
        opened.close()


def _check_slices(params: Sequence[torch.Tensor], slices: int) -> None:
    mesh = mesh_of(params)
    found = 1 if mesh is None else mesh.size()
    if found != slices:
        raise ValueError(f"slices is {slices}, expected {found}: the devices of the model's DTensors, or 1 without any")


def warm_up(optimizer: OffloadOptimizer, overlap: bool) -> int:
    """Steps that are unlike those after them: synchronous ones, the first late one, and one that nothing precedes."""
    config = optimizer._require_engine().config
    return (config.delay_after + 1 if config.update == "delayed" else 0) + overlap


@dataclass(frozen=True)
class Stepped:
    """A step that has been run: what it took, and when, in virtual time."""

    backwards: int
    spent: Counts
    start_ns: int
    stop_ns: int


def steady_steps(
    rehearsal: Rehearsal, optimizer: OffloadOptimizer, backwards: int, *, least: int
) -> tuple[Stepped, Stepped | None]:
    """A step that takes as long as the one before, after at least so many; of many backwards, only some are run, and
    a second step has one more of them."""
    few = min(backwards, ALIKE_FROM)
    for _ in range(least):
        _step(rehearsal, optimizer, 1)
    steps = [_step(rehearsal, optimizer, few) for _ in range(2)]
    while steps[-1].spent.ns != steps[-2].spent.ns and len(steps) < MOST_STEPS:
        steps.append(_step(rehearsal, optimizer, few))
    return steps[-1], None if backwards == few else _step(rehearsal, optimizer, few + 1)


def _one_step(steps: tuple[Stepped, Stepped | None], backwards: int) -> Counts:
    """Of so many backwards."""
    step, longer = steps
    if longer is None:
        return step.spent
    return step.spent.plus(longer.spent.since(step.spent), backwards - step.backwards)


def _step(rehearsal: Rehearsal, optimizer: OffloadOptimizer, backwards: int) -> Stepped:
    before = rehearsal.counts()
    for _ in range(backwards):
        rehearsal.program.micro_batch()
    optimizer.step()
    optimizer.zero_grad()
    after = rehearsal.counts()
    return Stepped(backwards, after.since(before), before.ns, after.ns)


def _result(rehearsal: Rehearsal, step: Counts) -> DryRun:
    device = rehearsal.device
    device.collect_spans()
    return DryRun(
        profile=rehearsal.durations.profile,
        ranks=rehearsal.durations.ranks,
        slices=rehearsal.durations.slices,
        num_params=num_params(rehearsal),
        step=step,
        device=device_bytes(rehearsal),
        host_bytes=device.allocated_bytes["host"],
        locked_bytes=device.locked_bytes,
        is_stretched=rehearsal.is_stretched,
        trace=device.trace,
    )


def num_params(rehearsal: Rehearsal) -> int:
    """That are trained, of this device."""
    return sum(local_of(param).numel() for param in rehearsal.program.params.values())


def device_bytes(rehearsal: Rehearsal) -> DeviceBytes:
    """When most was there so far."""
    peak = rehearsal.memory.peak()
    return DeviceBytes(
        parameters=rehearsal.model_bytes,
        activations=peak.activations_bytes,
        gradients=peak.gradients_bytes,
        engine=rehearsal.device.allocated_bytes["device"],
        reserved=round(rehearsal.durations.profile.gpu.reserved_gib * GIB),
    )
