"""What a training run is: everything its losses depend on, checked before anything starts."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from zofftk.errors import InputError
from zofftk.gpt_config import GPTConfig
from zofftk.presets import find_preset

DTYPES = ("bf16", "fp32", "fp16")
DEVICES = ("auto", "cpu", "cuda")
UPDATES = ("synchronous", "delayed")
# A resumed run may train longer, elsewhere, or find its text in another place; all else has to stay.
FREE_ON_RESUME = ("steps", "data", "device")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    preset: str
    data: tuple[str, ...] | None
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    dtype: str
    device: str
    max_grad_norm: float
    seed: int
    update: str = "synchronous"
    delay_after: int = 40

    def __post_init__(self) -> None:
        find_preset(self.preset)
        for name in ("steps", "batch_size", "seq_len"):
            _expect(getattr(self, name) >= 1, name, "a whole number of at least 1", getattr(self, name))
            _expect(getattr(self, name) < 2**63, name, "a whole number below 2**63", getattr(self, name))
        _expect(self.seed >= 0, "seed", "a whole number of at least 0", self.seed)
        _expect(self.seed < 2**64, "seed", "a whole number below 2**64", self.seed)
        for name in ("lr", "max_grad_norm"):
            value = getattr(self, name)
            _expect(math.isfinite(value) and value > 0, name, "a finite number above 0", value)
        _expect(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        _expect(self.update in UPDATES, "update", f"one of {', '.join(UPDATES)}", self.update)
        _expect(self.delay_after >= 0, "delay_after", "a whole number of at least 0", self.delay_after)
        _expect(self.device in DEVICES, "device", f"one of {', '.join(DEVICES)}", self.device)

    @property
    def model(self) -> GPTConfig:
        return replace(find_preset(self.preset).model, seq=self.seq_len)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "TrainConfig":
        """The run that the given options describe; the preset decides what they leave open."""
        preset_name = options.get("preset", "tiny")
        preset = find_preset(preset_name)
        defaults = {
            "data": None,
            "steps": preset.steps,
            "batch_size": preset.batch_size,
            "seq_len": preset.model.seq,
            "lr": preset.lr,
            "dtype": "bf16",
            "device": "auto",
            "max_grad_norm": 1.0,
            "seed": 0,
        }
        return cls(**(defaults | options | {"preset": preset_name}))

    def resumed_with(self, options: dict[str, Any]) -> "TrainConfig":
        """This saved run with the options given to its continuation, refusing those that would change its losses."""
        for name in (field.name for field in fields(self) if field.name not in FREE_ON_RESUME):
            saved = getattr(self, name)
            _expect(options.get(name, saved) == saved, name, f"{saved}, as in the checkpoint", options.get(name))
        return replace(self, **options)


def _expect(fulfilled: bool, name: str, expected: str, got: object) -> None:
    if not fulfilled:
        raise InputError(f"--{name.replace('_', '-')}: expected {expected}, got {got}")
