"""What `optimizer.state[p]` holds: views of the host's memory, which stay where they are whoever assigns to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any

import torch

from zofftk.managed import Managed
from zofftk.rules.base import Rule
from zofftk.state_dict import check_state

if TYPE_CHECKING:
    from zofftk.engine import Engine


class HostViews(dict[str, Any]):
    """A parameter's `step`, and the views that show what the host holds of it.

    After a checkpoint was loaded, trainers move the states to where the parameters are (`state[key] = value.cuda()`;
    Lightning does, and many scripts). A view replaced by a copy would show and save old values from then on, and
    4 bytes a parameter and state would fill the device. So an assignment takes over the values only.

    `index` is the parameter's. `ready` is called before anything is read: it waits for an update that is under way.
    """

    def __init__(self, index: int, ready: Callable[[], None], **others: Any) -> None:
        super().__init__(**others)
        self.index = index
        self._ready = ready
        self._shown: set[str] = set()
        self._counted: tuple[int, int] | None = None

    def shows(self, key: str) -> bool:
        return key in self._shown and key in self

    def show(self, key: str, view: torch.Tensor) -> None:
        """A state, which stays where it is from now on."""
        self._shown.add(key)
        super().__setitem__(key, view)

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
        number = super().__getitem__("step")
        if not isinstance(number, torch.Tensor):
            number = torch.zeros((), dtype=torch.float32)
            super().__setitem__("step", number)
        number.fill_(step)
        self._counted = id(number), number._version

    @property
    def is_recounted(self) -> bool:
        """Somebody has changed `step` since, or taken it away."""
        number = super().get("step")
        return self._counted != (id(number), getattr(number, "_version", -1))

    def __setitem__(self, key: str, value: Any) -> None:
        view = self.get(key)
        if key not in self._shown or view is None:
            super().__setitem__(key, value)
        elif value is not view:
            if not isinstance(value, torch.Tensor) or value.shape != view.shape:
                raise ValueError(
                    f"the state {key!r} is a tensor of shape {tuple(view.shape)} and cannot become another"
                )
            view.copy_(value.detach())

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def edited_states(
    params: Sequence[Managed], states: Mapping[torch.Tensor, Any], rule: Rule
) -> list[tuple[Managed, dict[str, Any] | None]]:
    """Parameters whose entry in `states` the user has changed, with what is there now: None, to start anew, or a dict.

    Raises ValueError where it cannot be a state of the parameter.
    """
    edited: list[tuple[Managed, dict[str, Any] | None]] = []
    for managed in params:
        state = states.get(managed.tensor)
        if not state:
            if managed.step:
                edited.append((managed, None))
        elif not isinstance(state, HostViews) or state.index != managed.index or state.is_recounted:
            check_state(state, managed.tensor, managed.name, rule)
            edited.append((managed, dict(state)))
    return edited


def finisher(engine: Engine) -> Callable[[], None]:
    """Waits until the host's states are final, as long as there is an engine that changes them."""
    reference = weakref.ref(engine)

    def finish() -> None:
        engine = reference()
        if engine is not None and engine.is_exchanging:
            engine.finish()

    return finish
