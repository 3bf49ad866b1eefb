"""Notices when a module's parameter becomes another object, as `load_state_dict(assign=True)` makes it.

An optimizer knows its parameters as objects. One that is put into a module in the place of a known one would never be
updated, while the known one, which nobody uses any more, would be.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zofftk.managed import Gathered

if TYPE_CHECKING:
    from zofftk.engine import Engine


class Replacements:
    """Which parameters of one optimizer have been replaced; `known` holds their ids, and may grow."""

    def __init__(self, known: Container[int]) -> None:
        self.known = known
        self._new: dict[int, torch.Tensor] = {}  # by the id of the known one
        _watching.add(self)
        _install()

    def note(self, old: torch.Tensor, new: torch.Tensor) -> None:
        replaced = [id(old)] if id(old) in self.known else [known for known, now in self._new.items() if now is old]
        for known in replaced:
            self._new[known] = new

    def pending(self) -> dict[int, torch.Tensor]:
        """The parameter that now stands where a known one stood, by the known one's id."""
        self._new = {
            known: new
            for known, new in self._new.items()
            if id(new) != known  # it is back
            and not any(id(new) in watching.known for watching in _watching)  # tied, or another optimizer's
        }
        return self._new

    def check(self, engine: Engine) -> None:
        """Raises where the new one is being trained, which the optimizer knows nothing of."""
        for known, new in self.pending().items():
            managed = next(managed for managed in engine.managed if id(managed.tensor) == known)
            if managed.gathered is not Gathered.LIVE and new.requires_grad and new.grad is not None:
                raise RuntimeError(
                    f"{managed.name} is another object in its module now (load_state_dict(assign=True), or a new "
                    "Parameter), and this optimizer holds the one before: call adopt_replaced() right after the change"
                )

    def done(self, known: int) -> None:
        del self._new[known]


_watching: weakref.WeakSet[Replacements] = weakref.WeakSet()
_hook: Any = None


def _install() -> None:
    """Once, for good: a look at an empty set is all it costs a process whose optimizers are gone."""
    global _hook
    if _hook is None:
        _hook = register_module_parameter_registration_hook(_on_registration)


def _on_registration(module: nn.Module, name: str, new: torch.Tensor | None) -> None:
    old = module._parameters.get(name)
    if old is not None and new is not None and new is not old:
        for watching in _watching:
            watching.note(old, new)
