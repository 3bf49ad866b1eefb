"""One micro-batch of a model as a list of events, recorded once for each model, micro-batch and cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zofftk.baselines.gpt_2020 import GPT2020
from zofftk.gpt_config import GPTConfig
from zofftk.profile import Profile
from zofftk.virtual.durations import Durations
from zofftk.virtual.events import Event, ParamId, Part, Parts
from zofftk.virtual.fake_model import build_fake
from zofftk.virtual.layer_stack import find_layer_stack
from zofftk.virtual.recording import param_id, record_stretched
from zofftk.virtual.repeating import FEW

DTYPE = torch.float16  # the paper's; of parameters, activations and gradients


@dataclass(frozen=True)
class Workload:
    """What one device of a slice group does for a micro-batch, without an optimizer.

    `numel` is the number of elements of each parameter, this device's slice of it.
    """

    config: GPTConfig
    micro_batch: int
    slices: int
    parts: Parts
    numel: dict[ParamId, int]

    @property
    def num_params(self) -> int:
        return sum(self.numel.values())

    def params_of(self, layer: int) -> int:
        """Elements of the parameters of one layer; -1: of what is in no layer."""
        return sum(numel for param, numel in self.numel.items() if param.layer == layer)

    @property
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
    """Raises ValueError for a model of fewer than 6 layers, of which not enough repeat to be continued."""
    fake = FakeTensorMode()
    durations = Durations(profile, 1, slices)
    model = build_fake(lambda: GPT2020(config, slices), fake, DTYPE)
    stack = find_layer_stack(model, least=FEW + 2)
    if stack is None:
        raise ValueError(f"expected a model of {FEW + 2} layers or more, got {config.layers}")
    parts = record_stretched(model, stack, model_loss(micro_batch, config.seq), fake, durations)
    numel = {param_id(name, stack.prefix): param.numel() for name, param in model.named_parameters()}
    return Workload(config, micro_batch, slices, parts, numel)
