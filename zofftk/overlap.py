"""Hide the update and the way up behind the next forward: `step()` returns early, modules wait for what they read.

A parameter lands before torch reads it, whoever asks (`pending`). Kernels that torch does not see, such as extensions
that take an address, are served by hooks: each module's forward first lands the module's own parameters. Which modules
a forward calls is learnt from the forwards so far; a parameter whose module was never called (some read their
children's weights directly) lands where the whole model is entered.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zofftk.optimizer import OffloadOptimizer
from zofftk.ranks.ddp import leave_gradients, take_gradients_back

logger = logging.getLogger("zofftk")


def offload(model: nn.Module, optimizer: OffloadOptimizer) -> ForwardOverlap:
    """Hand the model over, so that `optimizer.step()` returns while the update runs.

    From then on each module's forward waits for its own parameters, and so does other code that reads or writes a
    parameter through torch, in a forward or between two. The results have the same bits as without. Call
    `optimizer.synchronize()` before code whose reads torch does not show: `torch.func` transforms of plain functions,
    scripted or traced functions, constructors such as `torch.tensor(p)`, DLPack, and kernels called by address outside
    of the module that owns the parameter. Until its value has arrived, a parameter's class is a subclass of its own.

    Hand over what is called: of a model that was compiled, `torch.compile`'s result, which then waits as a whole where
    it is entered, as does a compiled submodule. A module compiled in place (`module.compile()`) ignores hooks added
    later; a model that holds one is left as it is, which is logged once. Several models may be handed over, and one
    more than once. A `DistributedDataParallel` leaves its gradients to the optimizer, which averages them over ranks;
    it has to be handed over. As inside of its `no_sync()`, it does not broadcast buffers either.

    Args:
        model: the root, whose forward is called.
        optimizer: holds some or all of its parameters.

    Returns:
        a handle; its `remove()` undoes everything.

    Raises:
        TypeError: not a module, or not one of this package's optimizers.
        ValueError: the optimizer holds none of the model's parameters; a `DistributedDataParallel` is over other ranks
            than the optimizer, or has `static_graph`.
        RuntimeError: the optimizer is closed.

    Source: ZeRO-Offload, figure 3 (the parameters' way up), moved behind the forward that reads them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"offload expects a torch module, got {type(model).__name__}")
    if not isinstance(optimizer, OffloadOptimizer):
        raise TypeError(f"offload expects one of zofftk's optimizers, got {type(optimizer).__name__}")
    engine = optimizer._require_engine()
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not any(id(param) in known for param in model.parameters()):
        raise ValueError("offload expects a model and its optimizer; this one holds none of the model's parameters")
    return ForwardOverlap(model, optimizer, leave_gradients(model, engine.ranks.members))


class ForwardOverlap:
    """The hooks on a model, and which of its parameters a module waits for.

    `sending` are those in it that send no gradients any more, until it is removed.
    """

    def __init__(
        self, model: nn.Module, optimizer: OffloadOptimizer, sending: Sequence[nn.parallel.DistributedDataParallel]
    ) -> None:
        self._sending = sending
        self._optimizer = weakref.ref(optimizer)  # the model does not keep it alive
        self._params = [*model.parameters()]
        self._units = dict(_units(model))
        self._covered = {id(param) for params in _seen_by_torch(model) for param in params}  # see `_enter`
        self._hooks: list[RemovableHandle] = []
        in_place = [name for name, module in model.named_modules() if _is_compiled_in_place(module)]
        if in_place:
            logger.warning(
                "zofftk.offload: %s was compiled in place and ignores hooks added now, so step() waits for the whole "
                "update; call zofftk.offload before module.compile()",
                in_place[0] or "the model",
            )
            return
        for module in self._units:
            self._hooks.append(module.register_forward_pre_hook(_Hook(self._enter), prepend=True))
        self._hooks.append(model.register_forward_pre_hook(_Hook(self._enter_root), prepend=True))
        optimizer.overlaps.add(self)

    def _enter_root(self, module: nn.Module) -> None:
        if (optimizer := self._optimizer()) is not None:
            params = [param for group in optimizer.param_groups for param in group["params"]]  # also of later groups
            if torch.is_grad_enabled():
                params = [param for param in params if id(param) not in self._covered]
            optimizer.land(params)  # all of them in an evaluation, where modules choose their kernels by what they see

    def _enter(self, module: nn.Module) -> None:
        """Its parameters are read by its own forward, and need not be waited for where the model is entered."""
        params = self._units.get(module) or module.parameters(recurse=False)  # a copy of a module has its hooks
        self._covered.update(map(id, params))
        if (optimizer := self._optimizer()) is not None:
            optimizer.land(params)

    def remove(self) -> None:
        """Take the hooks off; `step()` waits for the update again. Also after the optimizer was closed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        take_gradients_back(self._sending)
        if (optimizer := self._optimizer()) is not None:
            optimizer.overlaps.discard(self)
            optimizer.land(self._params)


class _Hook:
    """Calls `wait` before a module's forward. A copy of the module, or a pickle, gets one that does nothing."""

    def __init__(self, wait: Callable[[nn.Module], None]) -> None:
        self._wait = torch.compiler.disable(wait)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._wait(module)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_wait

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return no_wait


def no_wait(module: nn.Module, *_: Any) -> None:
    """In place of the hook, in a copy of a model that was handed over: nobody updates the copy."""


# In an evaluation these read their children's parameters through torch, but only where they find no hooks on them.
_FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _units(module: nn.Module) -> list[tuple[nn.Module, list[torch.Tensor]]]:
    """Modules that wait, with the parameters each waits for: its own, or all below it where it is compiled."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        return [(module, [*module.parameters()])]
    if isinstance(module, _FUSED):
        return []
    own: list[torch.Tensor] = list(module.parameters(recurse=False))
    units = [(module, own)] if own else []
    for child in module.children():
        units += _units(child)
    return units


def _seen_by_torch(module: nn.Module) -> list[list[torch.Tensor]]:
    """Parameters that need no hook."""
    return [[*part.parameters()] for part in module.modules() if isinstance(part, _FUSED)]


def _is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
