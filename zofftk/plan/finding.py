"""From what a user writes to a source: a preset's name, a configuration's path, or `module:function`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zofftk.errors import InputError
from zofftk.plan.setting import Setting
from zofftk.plan.sources import Source, preset_source
from zofftk.presets import PRESETS

LONGEST_DEFAULT = 1024  # tokens, where a configuration allows more
LONGEST_SAID = 300  # characters


def find_source(model: str, loss: str | None = None) -> Source:
    """A preset's name; the path of a Hugging Face `config.json` or of the folder it is in; or `module:function`.

    `loss` is the `module:function` that returns the loss, given the model and the setting.

    Raises:
        InputError: none of these, or what it names cannot be read, imported or built.
    """
    if model in PRESETS:
        if loss is not None:
            raise InputError(f"--loss: expected module:function as the model with it, got the preset {model}")
        return preset_source(model)
    path = Path(model)
    if model and (path.suffix == ".json" or path.is_dir()):
        return hf_source(path / "config.json" if path.is_dir() else path, _function(loss, "--loss") if loss else None)
    if ":" in model:
        build = _function(model, "model")
        return _built(lambda: Source.of_function(build, _function(loss, "--loss") if loss else None, model), model)
    raise InputError(
        f"model: expected one of {', '.join(PRESETS)}, the path of a Hugging Face config.json, or module:function; "
        f"got {model!r}"
    )


def hf_source(path: Path, loss: Callable[..., torch.Tensor] | None = None) -> Source:
    """Raises InputError: no such file, no configuration, or transformers is not installed or does not know it."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"model: {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"model: {path}: not a JSON file: {error}") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise InputError(f"model: {path}: expected a Hugging Face configuration with a model_type")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise InputError("model: a Hugging Face configuration needs transformers: pip install transformers") from None

    def build() -> nn.Module:
        values = {key: value for key, value in content.items() if key != "model_type"}
        config: Any = transformers.AutoConfig.for_model(content["model_type"], **values)
        config.use_cache = False
        return transformers.AutoModelForCausalLM.from_config(config)

    def its_loss(model: nn.Module, setting: Setting) -> torch.Tensor:
        ids = torch.zeros(setting.micro_batch, setting.seq, dtype=torch.long)
        return model(input_ids=ids, labels=ids).loss

    source = _built(lambda: Source.of_function(build, loss or its_loss, str(path)), str(path))
    longest = content.get("max_position_embeddings", content.get("n_positions"))
    default = replace(source.default, seq=min(longest or LONGEST_DEFAULT, LONGEST_DEFAULT))
    return replace(source, default=default, max_seq=longest)


def _function(name: str, what: str) -> Callable[..., Any]:
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function):
        raise InputError(f"{what}: expected module:function, got {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's raises what it likes
        raise InputError(f"{what}: {name}: cannot import {module_name}: {said(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"{what}: expected module:function, {module_name} has no function {function!r}")
    return found


def _built(make: Callable[[], Source], name: str) -> Source:
    try:
        return make()
    except InputError:
        raise
    except Exception as error:  # code of the user's, or a configuration with a wrong value
        raise InputError(f"model: {name}: cannot be built: {said(error)}") from error


def said(error: Exception) -> str:
    """What an error of other people's code says, in one line that can be read."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= LONGEST_SAID else text[:LONGEST_SAID] + ' ...'}"
