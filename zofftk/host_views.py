"""What `optimizer.state[p]` holds: views of the host's memory, which stay where they are whoever assigns to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, ValuesView
from typing import TYPE_CHECKING, Any

import torch

from zofftk.mapped import FileMappings
from zofftk.state_dict import COUNTS, STATES, entries_of_others

if TYPE_CHECKING:
    from zofftk.engine import Engine
    from zofftk.managed import Managed


class HostViews(dict[str, Any]):
    """A parameter's `step`, and the views that show what the host holds of it.

    After a checkpoint was loaded, trainers move the states to where the parameters are (`state[key] = value.cuda()`;
    Lightning does, and many scripts). A view replaced by a copy would show and save old values from then on, and 12
    bytes a parameter would fill the device. So an assignment takes over the values only.

    `ready` is called before anything is read: it waits for an update that is under way.
    """

    def __init__(self, ready: Callable[[], None], **views: Any) -> None:
        super().__init__(**views)
        self._ready = ready

    def __getitem__(self, key: str) -> Any:
        self._ready()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._ready()
        return super().get(key, default)

    def items(self) -> ItemsView[str, Any]:
        self._ready()
        return super().items()

    def values(self) -> ValuesView[Any]:
        self._ready()
        return super().values()

    def count(self, step: int) -> None:
        """The parameter has had so many updates; nothing is waited for."""
        for key in COUNTS:
            super().__getitem__(key).fill_(step)

    def __setitem__(self, key: str, value: Any) -> None:
        view = self.get(key)
        if view is None or (key not in STATES and key not in COUNTS):
            super().__setitem__(key, value)
        elif key in COUNTS:
            view.fill_(float(value))
        elif value is not view:
            if not isinstance(value, torch.Tensor) or value.shape != view.shape:
                raise ValueError(
                    f"the state {key!r} is a tensor of shape {tuple(view.shape)} and cannot become another"
                )
            view.copy_(value.detach())

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def views_of(managed: Managed, ready: Callable[[], None], loaded: dict[str, Any] | None) -> HostViews:
    """What the host holds of a parameter, and beside it what else was in the state that was loaded for it."""
    views = {name: managed.segment.view(name, managed.index, managed.shape) for name in STATES}
    counts = {name: torch.zeros((), dtype=dtype) for name, dtype in COUNTS.items()}
    return HostViews(ready, **{"step": counts.pop("step"), **views, **counts, **entries_of_others(loaded or {})})


def load_state(managed: Managed, saved: dict[str, Any] | None, files: FileMappings | None = None) -> None:
    """Copy a checked state into the host's memory; None: as if the parameter had never been updated."""
    for name in STATES:
        view = managed.segment.view(name, managed.index, managed.shape)
        if saved is not None and saved.get(name) is not None:
            (files or FileMappings()).copy(view, saved[name])
        elif name != "master":
            view.zero_()
    managed.step = 0 if saved is None else int(saved["step"])


def finisher(engine: Engine) -> Callable[[], None]:
    """Waits until the host's states are final, as long as there is an engine that changes them."""
    reference = weakref.ref(engine)

    def finish() -> None:
        engine = reference()
        if engine is not None and (engine.way_up.in_flight or engine.way_up.updated):
            engine.finish()

    return finish
