"""A run of many ranks on disk: a folder for any number of them, with what `Checkpoint` has in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zofftk.checkpoint import FORMAT, Checkpoint
from zofftk.errors import InputError
from zofftk.launch import Launch
from zofftk.sharding.saving import load_sharded, save_sharded

PLAIN = ("step", "config", "model_config", "data_fingerprint", "samples", "schedule")


@dataclass(frozen=True, kw_only=True)
class RankCheckpoint(Checkpoint):
    """What is plain has been read; the model and the optimizer's states are read into those they are for."""

    folder: Path

    def check_model(self, config: Any, model: nn.Module) -> None:
        self.check_config(config)

    def load_model(self, model: nn.Module) -> None:
        """Comes with the optimizer's states, for which it has to be there first."""

    def load_optimizer(self, model: nn.Module, optimizer: Any) -> None:
        _load({"model": model, "optimizer": optimizer}, self.folder)


def save_rank_checkpoint(folder: Path, plain: Mapping[str, Any], model: nn.Module, optimizer: Any, ranks: Launch):
    """Every rank calls it. Raises OSError, which names the folder, on all of them where it cannot be written."""
    # The ranks' samples differ in their times; the first rank's count. One text, since torch's checkpoints take lists
    # and dicts apart and keep an entry for each number.
    run = ranks.first(lambda: json.dumps({"format": FORMAT} | {name: plain[name] for name in PLAIN}))
    with ranks.at("saving"):
        save_sharded({"run": run, "model": model, "optimizer": optimizer}, folder)


def load_rank_checkpoint(folder: Path) -> RankCheckpoint:
    """Its plain part; every rank calls it."""
    state = {"run": ""}
    _load(state, folder, check=False)
    try:
        content = json.loads(state["run"])
        found = content.pop("format", None)
    except (TypeError, ValueError, AttributeError):
        found = None
    if found != FORMAT:
        raise InputError(f"--resume: expected a folder marked {FORMAT!r}; {folder} is marked {found!r}")
    if content.keys() != set(PLAIN):
        raise InputError(f"--resume: expected the entries {', '.join(PLAIN)}; {folder} holds {', '.join(content)}")
    content["config"] = {name: tuple(v) if isinstance(v, list) else v for name, v in content["config"].items()}
    return RankCheckpoint(**content, model={}, optimizer={}, folder=folder)


def _load(state: dict[str, Any], folder: Path, *, check: bool = True) -> None:
    try:
        load_sharded(state, folder, check=check)
    except OSError as error:
        raise InputError(f"--resume: expected a checkpoint; {error}") from None
    except InputError as error:
        raise InputError(f"--resume: {folder}: {error}") from None
