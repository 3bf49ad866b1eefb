"""What a plan says, as plain values that go into JSON and come back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zofftk.errors import InputError
from zofftk.plan.memory import Memory, MemoryList
from zofftk.plan.setting import Setting
from zofftk.plan.step_parts import Stage, StepParts

SCHEMA = "zofftk plan 1"


@dataclass(frozen=True)
class Compared:
    """A setting that was tried against others."""

    setting: Setting
    step_ms: float
    fits: bool

    @property
    def ms_per_sequence(self) -> float:
        """Of all ranks together."""
        return self.step_ms / self.setting.sequences_per_step


@dataclass(frozen=True)
class Alternative:
    """A setting that fits, in place of one that does not."""

    setting: Setting
    layers: int | None  # where the model has to be another
    num_params: int
    memory: Memory
    step_ms: float | None  # None with other layers
    reason: str


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        model, machine: what was asked about, and the profile's name.
        setting: that was asked about.
        layers: of the model; None where none repeat.
        num_params: of the whole model.
        memory: what it takes, by name, with what there is.
        step: where the time of a step goes; None where it does not fit.
        largest_micro_batch: that fits with all else as it is; None: none does.
        largest_layers, largest_params: the largest model of the same layers that fits; None: none does, or no layers.
        nearest: what fits instead, where it does not.
        best: the quickest of `compared` that fits, by sequence.
        best_reasons: what it changes, and what each change brings.
        assumed: numbers of the profile that nobody has measured, and what was taken for granted.
        seconds: how long the answer took.
    """

    model: str
    machine: str
    setting: Setting
    layers: int | None
    num_params: int
    memory: Memory
    step: StepParts | None
    largest_micro_batch: int | None
    largest_layers: int | None
    largest_params: int | None
    nearest: Alternative | None
    best: Compared | None
    best_reasons: tuple[str, ...]
    compared: tuple[Compared, ...]
    assumed: tuple[str, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with sums beside their parts; `from_dict` reads them back."""
        values = {"schema": SCHEMA, "fits": self.fits} | dataclasses.asdict(self)
        for where, memory in (("memory", self.memory), ("nearest", self.nearest and self.nearest.memory)):
            if memory is not None:
                target = values[where] if where == "memory" else values[where]["memory"]
                for place in ("device", "host"):
                    found: MemoryList = getattr(memory, place)
                    target[place] |= {"total_bytes": found.total_bytes, "fits": found.fits}
        if self.step is not None:
            values["step"] |= {"step_ms": self.step.step_ms, "tflops": self.step.tflops}
            for name, stage in self.step.stages.items():
                values["step"]["stages"][name]["total_ns"] = stage.total_ns
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Raises InputError for another format."""
        if values.get("schema") != SCHEMA:
            raise InputError(f"plan: expected the schema {SCHEMA!r}, got {values.get('schema')!r}")
        own = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        own["setting"] = Setting(**own["setting"])
        own["memory"] = _memory(own["memory"])
        own["step"] = own["step"] and _step(own["step"])
        own["nearest"] = own["nearest"] and _alternative(own["nearest"])
        own["compared"] = tuple(_compared(each) for each in own["compared"])
        own["best"] = own["best"] and _compared(own["best"])
        own["best_reasons"], own["assumed"] = tuple(own["best_reasons"]), tuple(own["assumed"])
        return cls(**own)


def _memory(values: Mapping[str, Any]) -> Memory:
    lists = {place: MemoryList(**_fields(MemoryList, values[place])) for place in ("device", "host")}
    return Memory(**lists, num_params=values["num_params"], devices_in_host=values.get("devices_in_host", 0))


def _step(values: Mapping[str, Any]) -> StepParts:
    own = _fields(StepParts, values)
    own["stages"] = {name: Stage(**_fields(Stage, stage)) for name, stage in own["stages"].items()}
    return StepParts(**own)


def _alternative(values: Mapping[str, Any]) -> Alternative:
    own = _fields(Alternative, values)
    return Alternative(**own | {"setting": Setting(**own["setting"]), "memory": _memory(own["memory"])})


def _compared(values: Mapping[str, Any]) -> Compared:
    return Compared(Setting(**values["setting"]), values["step_ms"], values["fits"])


def _fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(kind)}
