"""What the line asks of an optimizer: which fp32 states there are, which hyper-parameters, and the update itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from zofftk.validation import check_options


@dataclass(frozen=True)
class Elements:
    """Neighbours on the host that take the same update."""

    master: torch.Tensor
    moments: Mapping[str, torch.Tensor]  # fp32, by the optimizer's own names
    grad: torch.Tensor
    out: torch.Tensor  # takes the new value, in its own dtype; may be `grad`


@dataclass(frozen=True)
class Hyper(ABC):
    """The hyper-parameters of one update, captured when `step()` is called. Equal ones make the same update."""

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """The moments this update reads and writes."""

    @abstractmethod
    def update(self, elements: Elements, *, step: int, grad_scale: float, threads: int) -> None:
        """One pass: read `grad`, update the fp32 states in place, write the parameter to `out`."""

    def first(self) -> Hyper:
        """The same for a parameter whose moments hold nothing yet: they are zeros."""
        return self


@dataclass(frozen=True)
class Rule(ABC):
    """One optimizer. `name` is what its tasks are called on the host stream."""

    name: ClassVar[str]
    states: ClassVar[tuple[str, ...]]  # all moments it may have
    hyper_names: ClassVar[tuple[str, ...]]  # what each group must have
    saved_names: ClassVar[tuple[str, ...]]  # what the saved state of a parameter must have

    @property
    def torch_group(self) -> dict[str, Any]:
        """What torch's optimizer of this kind has in its groups beside the numbers; none of it has an effect here."""
        return {}

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise TypeError or ValueError that names the first entry of a group that cannot be followed."""
        check_options(group)
        self.check(group)

    @abstractmethod
    def check(self, group: dict[str, Any]) -> None:
        """Raise TypeError or ValueError that names the first hyper-parameter the update cannot use."""

    @abstractmethod
    def hyper(self, group: dict[str, Any]) -> Hyper: ...
