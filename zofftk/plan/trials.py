"""Dry runs of one model on one machine in many settings, none of them twice.

Layers that repeat are recorded once for a micro-batch, whatever the policy, the buckets and the number of layers. What
a setting needs of memory is found by the engine's construction and its first backwards, with all layers. Its time is
that of a whole step; a deep model's comes of two shallow ones, since each layer more, whose gradients fill buckets of
their own, takes as long as the one before (tested against whole runs: within 1 %).
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from zofftk.layout import ParamSpec, default_bucket_bytes
from zofftk.offload_adam import OffloadAdamW
from zofftk.plan.memory import Memory, memory_of
from zofftk.plan.setting import POLICIES, Setting
from zofftk.plan.sources import Source
from zofftk.plan.step_parts import StepParts, divide
from zofftk.profile import Profile
from zofftk.trace import Trace
from zofftk.virtual.dry_run import GIB, Stepped, steady_steps, training, warm_up
from zofftk.virtual.durations import Durations
from zofftk.virtual.events import Parts
from zofftk.virtual.mesh import virtual_mesh
from zofftk.virtual.rehearsal import Rehearsal

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
SHALLOW = (6, 8)  # layers that a deep model's step is continued from
DEEP = 12  # layers from which on that is quicker
LATE_FROM = 1  # the step that is looked at is one of those that come late


class Trials:
    """See the module. `source` and `profile` are those of all trials."""

    def __init__(self, source: Source, profile: Profile) -> None:
        self.source, self.profile = source, profile
        self.num_runs = 0
        self._recordings: dict[Setting, Parts] = {}
        self._memories: dict[tuple[Setting, int | None], Memory] = {}
        self._steps: dict[Setting, StepParts] = {}
        self._sizes: tuple[int, int] | None = None

    # -- sizes, without a run ----------------------------------------------------------------------------------

    def num_params(self, layers: int | None = None) -> int:
        """Of the whole model, which may have other than its own number of layers."""
        if self._sizes is None:
            self._sizes = self._count()
        rest, layer = self._sizes
        return rest + layer * (self.source.layers or 0 if layers is None else layers)

    def _count(self) -> tuple[int, int]:
        """Parameters beside the layers, and of one layer."""
        setting = replace(self.source.default, tp=1)
        if self.source.layers is None:
            return self._built_params(None, setting), 0
        one, two = (self._built_params(layers, setting) for layers in (1, 2))
        return one - (two - one), two - one

    def _built_params(self, layers: int | None, setting: Setting) -> int:
        with torch.device("meta"):
            model = self.source.build(layers, setting, None)
        return sum(param.numel() for param in model.parameters() if param.requires_grad)

    # -- memory ------------------------------------------------------------------------------------------------

    def memory(self, setting: Setting, layers: int | None = None) -> Memory:
        """What the setting needs, with so many layers (None: the model's own)."""
        key = setting, None if layers == self.source.layers else layers
        if key not in self._memories:
            with self._rehearsing(setting, layers) as rehearsal, self._training(rehearsal, setting) as optimizer:
                for _ in range(min(2, setting.backwards)):  # the second makes room for the sum of both
                    rehearsal.program.micro_batch()
                optimizer._require_engine().take_norms()  # what ranks tell each other has its place from then on
                is_late = "update" in POLICIES[setting.policy]
                self._memories[key] = memory_of(rehearsal, optimizer.rule, is_late=is_late)
        return self._memories[key]

    def surely_too_large(self, setting: Setting) -> bool:
        """The device would be full, as two shallow models say, which is quick; False where they cannot tell.

        What is alive grows along straight lines, steeper ones later, so a deep model needs at least this.
        """
        layers = self.source.layers
        if layers is None or layers < DEEP:
            return False
        few, more = (self.memory(setting, number).device for number in SHALLOW)
        growth = (more.total_bytes - few.total_bytes) / (SHALLOW[1] - SHALLOW[0])
        return few.total_bytes + growth * (layers - SHALLOW[0]) > few.capacity_bytes + GIB // 4

    # -- time --------------------------------------------------------------------------------------------------

    def step(self, setting: Setting) -> StepParts:
        """A step in this setting, fit it or not."""
        if setting not in self._steps:
            self._steps[setting] = self._continued(setting) if self._is_deep(setting) else self._run(setting, None)
        return self._steps[setting]

    def _is_deep(self, setting: Setting) -> bool:
        """Each layer more fills buckets of its own."""
        layers = self.source.layers
        if layers is None or layers < DEEP:
            return False
        per_layer = self.num_params(2) - self.num_params(1)
        return self._bucket_bytes(setting) <= per_layer * TORCH_DTYPES[setting.dtype].itemsize // setting.tp

    def _bucket_bytes(self, setting: Setting) -> int:
        """What the engine chooses for all layers."""
        itemsize = TORCH_DTYPES[setting.dtype].itemsize
        whole = [ParamSpec(0, self.num_params() // setting.tp, "", itemsize)]
        return setting.bucket_bytes or default_bucket_bytes(whole)

    def _continued(self, setting: Setting) -> StepParts:
        few, more = SHALLOW
        same = replace(setting, bucket_bytes=self._bucket_bytes(setting))
        first, second = (self._run(same, layers) for layers in SHALLOW)
        return first.continued(second, (self.source.layers or few) - few, more - few)

    def _run(self, setting: Setting, layers: int | None) -> StepParts:
        with self._rehearsing(setting, layers, keep_spans=True) as rehearsal:
            rehearsal.device.trace.spans = deque()  # all of them, however many
            with self._training(rehearsal, setting) as optimizer:
                least = warm_up(optimizer, "overlap" in POLICIES[setting.policy])
                step, longer = steady_steps(rehearsal, optimizer, setting.backwards, least=least)
            rehearsal.device.collect_spans()
            parts = _parts(rehearsal, step, optimizer.rule.name)
            if longer is None:
                return parts
            return parts.continued(
                _parts(rehearsal, longer, optimizer.rule.name), setting.backwards - step.backwards, 1
            )

    def timeline(self, setting: Setting) -> Trace:
        """Every span of whole steps with all layers."""
        with self._rehearsing(setting, None, keep_spans=True) as rehearsal:
            with self._training(rehearsal, setting) as optimizer:
                least = warm_up(optimizer, "overlap" in POLICIES[setting.policy])
                steady_steps(rehearsal, optimizer, setting.backwards, least=least)
            rehearsal.device.collect_spans()
            return rehearsal.device.trace

    # -- runs --------------------------------------------------------------------------------------------------

    @contextmanager
    def _rehearsing(self, setting: Setting, layers: int | None, *, keep_spans: bool = False) -> Iterator[Rehearsal]:
        self.num_runs += 1
        mesh_of: Any = virtual_mesh(setting.tp) if setting.tp > 1 else nullcontext()
        key = replace(setting, backwards=1, ranks=1, policy="synchronous", bucket_bytes=None)
        with _collector_paused(), mesh_of as mesh:
            rehearsal = Rehearsal(
                lambda: self.source.build(layers, setting, mesh),
                lambda model: self.source.loss(model, setting),
                Durations(self.profile, setting.ranks, setting.tp),
                dtype=TORCH_DTYPES[setting.dtype],
                keep_spans=keep_spans,
                recorded=self._recordings.get(key),
            )
            if rehearsal.recorded is not None:
                self._recordings[key] = rehearsal.recorded
            yield rehearsal

    def _training(self, rehearsal: Rehearsal, setting: Setting) -> Any:
        options = dict(POLICIES[setting.policy])
        if options.get("update") == "delayed":
            options["delay_after"] = LATE_FROM
        overlap = options.pop("overlap", False)
        return training(rehearsal, OffloadAdamW, overlap=overlap, bucket_bytes=setting.bucket_bytes, **options)


def _parts(rehearsal: Rehearsal, step: Stepped, rule: str) -> StepParts:
    parts, stages = divide(rehearsal.device.trace.spans, step.start_ns, step.stop_ns, rule)
    spent = step.spent
    return StepParts(parts, stages, spent.flops, spent.bytes_down, spent.bytes_up, spent.bytes_between)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A run makes millions of objects that live to its end, which the collector would look at again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
