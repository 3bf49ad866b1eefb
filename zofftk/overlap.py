"""Hide the update and the way up behind the next forward: `step()` returns early, modules wait for what they read.

Which modules a forward calls is learnt from the forwards so far. A parameter whose module was never called (some read
their children's weights directly) is waited for where the whole model is entered; so is every parameter in the first
forward, and whenever a module is called outside of the model's own forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zofftk.optimizer import OffloadAdamW

logger = logging.getLogger("zofftk")


def offload(model: nn.Module, optimizer: OffloadAdamW) -> ForwardOverlap:
    """Hand the model over, so that `optimizer.step()` returns while the update runs.

    From then on each module's forward waits for its own parameters; `model.state_dict()` and `optimizer.state_dict()`
    wait for all. Code that reads or writes a parameter in any other way between `step()` and the next forward calls
    `optimizer.synchronize()` before. The results have the same bits as without.

    A submodule that was compiled before waits for all of its parameters where it is entered, and a model that was
    compiled before does so as a whole. A module that is called in a forward and whose weights the same forward also
    reads directly, before that call, would give the reader old values: leave such a model as it is
    (`zofftk.checked.CheckedAccess` finds such reads). A module compiled in place (`module.compile()`) ignores hooks
    added later; a model that holds one is left as it is, which is logged once.

    Args:
        model: the root, whose forward is called.
        optimizer: holds some or all of its parameters.

    Returns:
        a handle; its `remove()` undoes everything.

    Raises:
        TypeError: not a module, or not one of this package's optimizers.

    Source: ZeRO-Offload, figure 3 (the parameters' way up), moved behind the forward that reads them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"offload expects a torch module, got {type(model).__name__}")
    if not isinstance(optimizer, OffloadAdamW):
        raise TypeError(f"offload expects an OffloadAdamW, got {type(optimizer).__name__}")
    return ForwardOverlap(model, optimizer)


class ForwardOverlap:
    """The hooks on a model, and which of its parameters a module waits for."""

    def __init__(self, model: nn.Module, optimizer: OffloadAdamW) -> None:
        self._optimizer = optimizer
        self._model = model
        self._inside = False  # the root's forward
        self._covered: set[int] = set()  # ids of parameters whose module has been seen to be called
        self._units = dict(_units(model))
        self._hooks: list[RemovableHandle] = []
        in_place = [name for name, module in model.named_modules() if _is_compiled_in_place(module)]
        if in_place:
            logger.warning(
                "zofftk.offload: %s was compiled in place and ignores hooks added now, so step() waits for the whole "
                "update; call zofftk.offload before compiling",
                in_place[0] or "the model",
            )
            return
        for module in self._units:
            self._hooks.append(module.register_forward_pre_hook(self._hook(self._enter), prepend=True))
        self._hooks.append(model.register_forward_pre_hook(self._hook(self._enter_root), prepend=True))
        self._hooks.append(model.register_forward_hook(self._hook(self._leave_root), always_call=True))
        for module in model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(self._hook(lambda module: optimizer.land())))
        optimizer.returns_early = True

    def _hook(self, wait: Callable[[nn.Module], None]) -> Callable[..., Any]:
        @torch.compiler.disable
        def hook(module: nn.Module, *_: Any) -> None:
            wait(module)

        return cast(Callable[..., Any], hook)

    def _enter_root(self, module: nn.Module) -> None:
        self._inside = True
        for group in self._optimizer.param_groups:
            for param in group["params"]:  # with those that were added after the model was handed over
                if id(param) not in self._covered:
                    self._optimizer.land(param)

    def _leave_root(self, module: nn.Module) -> None:
        self._inside = False

    def _enter(self, module: nn.Module) -> None:
        if not self._inside and module is not self._model:
            self._optimizer.land()  # a part of the model is used alone
            return
        for param in self._units[module]:
            self._covered.add(id(param))
            self._optimizer.land(param)

    def remove(self) -> None:
        """Take the hooks off; `step()` waits for the update again. Also after the optimizer was closed."""
        self._optimizer.returns_early = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._optimizer.land()


def _units(module: nn.Module) -> list[tuple[nn.Module, list[torch.Tensor]]]:
    """Modules that wait, with the parameters each waits for: its own, or all below it where it is compiled."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        return [(module, [*module.parameters()])]
    own: list[torch.Tensor] = list(module.parameters(recurse=False))
    units = [(module, own)] if own else []
    for child in module.children():
        units += _units(child)
    return units


def _is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
