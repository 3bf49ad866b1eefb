"""A run on disk: everything that its next step depends on, written whole or not at all, checked before it is used."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zofftk.errors import InputError
from zofftk.gpt_config import GPTConfig
from zofftk.saving import load, save

FORMAT = "zofftk checkpoint 2"  # 1 had another order of the rows of `qkv`


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`config` is the run's configuration and `samples` what was measured at its `step` steps, as plain values."""

    step: int
    config: dict[str, Any]
    model_config: dict[str, Any]
    data_fingerprint: str
    samples: list[dict[str, Any]]
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]

    def check_model(self, config: GPTConfig, model: nn.Module) -> None:
        """Raises for the first field or tensor that differs, so that nothing is half loaded."""
        self.check_config(config)
        expected_tensors = model.state_dict()
        for name in sorted(expected_tensors.keys() | self.model.keys()):
            expected, saved = _describe(expected_tensors.get(name)), _describe(self.model.get(name))
            if expected != saved:
                raise InputError(f"--resume: {name}: expected {expected}, the checkpoint has {saved}")

    def check_config(self, config: GPTConfig) -> None:
        for name, expected in asdict(config).items():
            if (saved := self.model_config.get(name)) != expected:
                raise InputError(
                    f"--resume: expected a model with {name}={expected}, the checkpoint has {name}={saved}"
                )

    def load_model(self, model: nn.Module) -> None:
        """Before its optimizer is built, which takes its fp32 masters from it."""
        model.load_state_dict(self.model)

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.load_state_dict(self.optimizer)


def _describe(tensor: torch.Tensor | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Raises OSError, which names `path`, where it cannot be written; what was there before is then still there."""
    save(path, {"format": FORMAT} | vars(checkpoint))  # field by field: asdict would copy every tensor


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, on the CPU; loading runs no code from the file."""
    try:
        content = load(path)
    except OSError as error:
        raise InputError(f"--resume: expected a checkpoint; {path}: {error.strerror or error}") from None
    except InputError:
        raise InputError(f"--resume: expected a whole checkpoint; {path} is truncated, damaged or not one") from None
    found = content.pop("format", None) if isinstance(content, dict) else None
    if found != FORMAT:
        raise InputError(f"--resume: expected a file marked {FORMAT!r}; {path} is marked {found!r}")
    names = Checkpoint.__dataclass_fields__.keys()
    if content.keys() != names:
        raise InputError(f"--resume: expected the entries {', '.join(names)}; {path} holds {', '.join(content)}")
    return Checkpoint(**content)
