"""One micro-batch of a model as a list of events, recorded once for each model, micro-batch and cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zofftk.baselines.gpt_2020 import GPT2020
from zofftk.gpt_config import GPTConfig
from zofftk.profile import Profile, load_profile
from zofftk.virtual.batches import RECORDED, extrapolate
from zofftk.virtual.cost_tape import CostTape
from zofftk.virtual.durations import Durations
from zofftk.virtual.events import Event, Gradient, ParamId, Part, Parts, Spent
from zofftk.virtual.fake_model import build_fake
from zofftk.virtual.layer_stack import find_layer_stack
from zofftk.virtual.recording import param_id, record_few
from zofftk.virtual.repeating import FEW, stretch

DTYPE = torch.float16  # the paper's; of parameters, activations and gradients


@dataclass(frozen=True)
class Workload:
    """What one device of a slice group does for a micro-batch, without an optimizer.

    `few` are the events of its first layers, which `parts` continues; `numel` is the number of elements of each
    parameter, this device's slice of it.
    """

    config: GPTConfig
    micro_batch: int
    slices: int
    few: Parts
    parts: Parts
    numel: dict[ParamId, int]

    @cached_property
    def num_params(self) -> int:
        return sum(self.numel.values())

    def params_of(self, layer: int) -> int:
        """Elements of the parameters of one layer; -1: of what is in no layer."""
        return self._numel_by_layer[layer]

    @cached_property
    def _numel_by_layer(self) -> Counter[int]:
        counted: Counter[int] = Counter()
        for param, numel in self.numel.items():
            counted[param.layer] += numel
        return counted

    @cached_property
    def largest_param(self) -> int:
        return max(self.numel.values())

    def without_memory(self) -> Workload:
        """The same without what it takes and gives back: as long, and several times as quick to go through."""
        return replace(self, parts={part: _merged(events) for part, events in self.parts.items()})

    def events(self) -> Iterator[tuple[Part, list[Event]]]:
        """The parts, in the order that they run."""
        yield from self.parts.items()


def _merged(events: list[Event]) -> list[Event]:
    kept: list[Event] = []
    for event in events:
        last = kept[-1] if kept else None
        if isinstance(event, Spent) and isinstance(last, Spent) and last.phase == event.phase:
            kept[-1] = Spent(event.phase, last.flops + event.flops, last.ns + event.ns)
        elif isinstance(event, Spent | Gradient):
            kept.append(event)
    return kept


def model_loss(micro_batch: int, seq: int):
    """What `Rehearsal` calls a loss: a batch of so many samples, through the model."""

    def loss(model: torch.nn.Module) -> torch.Tensor:
        ids = torch.zeros(micro_batch, seq, dtype=torch.long)
        return model(ids, ids)

    return loss


@lru_cache(maxsize=16)
def record_workload(config: GPTConfig, micro_batch: int, slices: int, profile: Profile) -> Workload:
    """Models that differ in their number of layers alone share a recording, and so do machines.

    Raises ValueError for a model of fewer than 6 layers, of which not enough repeat to be continued.
    """
    if config.layers < FEW + 2:
        raise ValueError(f"expected a model of {FEW + 2} layers or more, got {config.layers}")
    few, shapes = _time_few(replace(config, layers=FEW + 2), micro_batch, slices, profile)
    own = {param.name: numel for param, numel in shapes.items() if param.layer == 0}
    numel = {ParamId(layer, name): n for layer in range(config.layers) for name, n in own.items()}
    numel |= {param: n for param, n in shapes.items() if param.layer < 0}
    return Workload(config, micro_batch, slices, few, stretch(few, FEW, config.layers), numel)


@lru_cache(maxsize=16)
def _time_few(config: GPTConfig, micro_batch: int, slices: int, profile: Profile) -> tuple[Parts, dict[ParamId, int]]:
    few, tape, shapes = _few(config, micro_batch, slices)
    return tape.timed(few, Durations(profile, 1, slices)), shapes


@lru_cache(maxsize=64)
def _few(config: GPTConfig, micro_batch: int, slices: int) -> tuple[Parts, CostTape, dict[ParamId, int]]:
    if micro_batch <= max(RECORDED):
        return _record_few(config, micro_batch, slices)
    (one, its_tape, shapes), (other, longer, _) = (_record_few(config, number, slices) for number in RECORDED)
    few, tape = extrapolate(((one, its_tape), (other, longer)), micro_batch)
    return few, tape, shapes


@lru_cache(maxsize=256)
def _record_few(config: GPTConfig, micro_batch: int, slices: int) -> tuple[Parts, CostTape, dict[ParamId, int]]:
    fake = FakeTensorMode()
    model = build_fake(lambda: GPT2020(config, slices), fake, DTYPE)
    stack = find_layer_stack(model, least=FEW + 2)
    assert stack is not None
    tape = CostTape(load_profile("v100-dgx2"), 1, slices)
    few = record_few(model, stack, model_loss(micro_batch, config.seq), fake, tape)
    return few, tape, {param_id(name, stack.prefix): param.numel() for name, param in model.named_parameters()}
