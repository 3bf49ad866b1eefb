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
from zofftk.profile import Profile
from zofftk.virtual.durations import Durations
from zofftk.virtual.events import Event, ParamId, Part, Parts
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

    def events(self) -> Iterator[tuple[Part, list[Event]]]:
        """The parts, in the order that they run."""
        yield from self.parts.items()


def model_loss(micro_batch: int, seq: int):
    """What `Rehearsal` calls a loss: a batch of so many samples, through the model."""

    def loss(model: torch.nn.Module) -> torch.Tensor:
        ids = torch.zeros(micro_batch, seq, dtype=torch.long)
        return model(ids, ids)

    return loss


@lru_cache(maxsize=256)
def record_workload(config: GPTConfig, micro_batch: int, slices: int, profile: Profile) -> Workload:
    """Models that differ in their number of layers alone share a recording.

    Raises ValueError for a model of fewer than 6 layers, of which not enough repeat to be continued.
    """
    if config.layers < FEW + 2:
        raise ValueError(f"expected a model of {FEW + 2} layers or more, got {config.layers}")
    few, shapes = _record_few(replace(config, layers=FEW + 2), micro_batch, slices, profile)
    own = {param.name: numel for param, numel in shapes.items() if param.layer == 0}
    numel = {ParamId(layer, name): n for layer in range(config.layers) for name, n in own.items()}
    numel |= {param: n for param, n in shapes.items() if param.layer < 0}
    return Workload(config, micro_batch, slices, few, stretch(few, FEW, config.layers), numel)


@lru_cache(maxsize=256)
def _record_few(config: GPTConfig, micro_batch: int, slices: int, profile: Profile) -> tuple[Parts, dict[ParamId, int]]:
    fake = FakeTensorMode()
    model = build_fake(lambda: GPT2020(config, slices), fake, DTYPE)
    stack = find_layer_stack(model, least=FEW + 2)
    assert stack is not None
    few = record_few(model, stack, model_loss(micro_batch, config.seq), fake, Durations(profile, 1, slices))
    return few, {param_id(name, stack.prefix): param.numel() for name, param in model.named_parameters()}
