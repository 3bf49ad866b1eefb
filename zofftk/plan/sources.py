"""What a plan may be asked about: a preset, a Hugging Face configuration, or a function that builds a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zofftk.errors import InputError
from zofftk.plan.setting import Setting
from zofftk.presets import PRESETS
from zofftk.virtual.layer_stack import LayerStack, find_layer_stack

Build = Callable[["int | None", Setting, Any], nn.Module]  # layers (None: as it is), setting, mesh
Loss = Callable[[nn.Module, Setting], torch.Tensor]

FEWEST_LAYERS = 2  # of a list of modules that look alike, to be taken for the layers of the model


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model that can be built with any number of layers.

    Attributes:
        name: as the user knows it.
        build: makes it, on the meta device.
        loss: makes a batch, calls the model, and returns what backward begins at.
        default: the setting it is trained with unless told otherwise.
        layers: how many it has; None where no list of modules that look alike was found.
        heads: of its attention, which are not cut; None: not known.
        can_slice: tensor parallelism can cut it.
        can_recompute: its layers can be run again in backward.
        max_seq: tokens of its longest sequence; None: not known.
        notes: what was assumed about it.
    """

    name: str
    build: Build
    loss: Loss
    default: Setting = field(default_factory=Setting)
    layers: int | None = None
    heads: int | None = None
    can_slice: bool = False
    can_recompute: bool = False
    max_seq: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Its code is this package's, and what goes wrong in it is no mistake of the user's."""
        return self.can_slice

    @staticmethod
    def of_function(build: Callable[..., nn.Module], loss: Loss | None = None, name: str = "the model") -> Source:
        """A model that `build()` returns; see `default_loss` for what it is called with unless `loss` is given."""
        return _of_function(build, loss, name)


def preset_source(name: str) -> Source:
    """Raises InputError for an unknown name."""
    if name not in PRESETS:
        raise InputError(f"model: expected one of {', '.join(PRESETS)}; got {name!r}")
    preset = PRESETS[name]

    def build(layers: int | None, setting: Setting, mesh: Any) -> nn.Module:
        from zofftk.gpt import GPT

        config = replace(
            preset.model, layers=layers or preset.model.layers, seq=setting.seq, recompute=setting.recompute
        )
        if mesh is None:
            return GPT(config)
        from zofftk.split_gpt import SplitGPT, split

        return split(SplitGPT(config), mesh)

    def loss(model: nn.Module, setting: Setting) -> torch.Tensor:
        ids = _token_ids(setting)
        return model(ids, ids)

    default = Setting(micro_batch=preset.batch_size, seq=preset.model.seq, recompute=preset.model.recompute)
    return Source(
        name=name,
        build=build,
        loss=loss,
        default=default,
        layers=preset.model.layers,
        heads=preset.model.heads,
        can_slice=True,
        can_recompute=True,
    )


def _of_function(build: Callable[..., nn.Module], loss: Loss | None, name: str) -> Source:
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected {name} to return a torch module, it returned {type(model).__name__}")
    stack = find_layer_stack(model, FEWEST_LAYERS)
    notes = [] if loss is not None else ["it is called with token ids; the loss is what it returns, or cross-entropy"]
    if stack is None:
        notes.append("it has no list of layers that look alike: its layers are neither varied nor recomputed")
    return Source(
        name=name,
        build=lambda layers, setting, mesh: with_layers(build(), layers, recompute=setting.recompute),
        loss=loss or default_loss,
        layers=None if stack is None else len(stack.layers),
        can_recompute=stack is not None,
        notes=tuple(notes),
    )


def with_layers(model: nn.Module, layers: int | None, *, recompute: bool) -> nn.Module:
    """The model with so many layers, of which further ones are like the last; each run again in backward if asked."""
    stack = find_layer_stack(model, FEWEST_LAYERS)
    if stack is None:
        return model
    if layers is not None:
        _resize(stack, layers)
    if recompute:
        for layer in stack.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def _resize(stack: LayerStack, layers: int) -> None:
    import copy

    kept = list(stack.layers)[:layers]
    more = [copy.deepcopy(kept[-1]) for _ in range(layers - len(kept))]
    stack.layers._modules = {str(number): layer for number, layer in enumerate([*kept, *more])}


def default_loss(model: nn.Module, setting: Setting) -> torch.Tensor:
    """What the model returns for token ids: a scalar, `.loss`, or logits, of which the cross-entropy is taken."""
    ids = _token_ids(setting)
    out: Any = model(ids)
    out = next((found for key in ("loss", "logits") if (found := getattr(out, key, None)) is not None), out)
    out = out[0] if isinstance(out, tuple | list) else out
    if not isinstance(out, torch.Tensor):
        raise InputError(f"model: expected a tensor from a call with token ids, got {type(out).__name__}; give a loss")
    if out.dim() == 3 and out.shape[:2] == ids.shape:
        # A 16-bit log-softmax would round the loss to about two digits.
        return F.cross_entropy(out.flatten(0, 1).float(), ids.flatten())
    return out if out.dim() == 0 else out.float().mean()


def _token_ids(setting: Setting) -> torch.Tensor:
    return torch.zeros(setting.micro_batch, setting.seq, dtype=torch.long)
