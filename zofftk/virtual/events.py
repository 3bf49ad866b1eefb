"""What a micro-batch does, as a list: time spent, memory taken and given back, parameters read, gradients made.

A block of memory is known by where it was taken: the part of the run, and how many were taken there before. Parts are
forward and backward of each layer, and what comes before, between and after them. So the events of two layers are equal
but for the layers' numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

PartName = Literal["before", "forward", "between", "backward", "after"]


@dataclass(frozen=True)
class Part:
    """`layer` is -1 where the part is of no layer."""

    name: PartName
    layer: int = -1

    def shifted(self, by: int) -> Part:
        return self if self.layer < 0 else Part(self.name, self.layer + by)


@dataclass(frozen=True)
class BlockId:
    part: Part
    number: int

    def shifted(self, by: int) -> BlockId:
        return BlockId(self.part.shifted(by), self.number)


@dataclass(frozen=True)
class ParamId:
    """A parameter by its layer, or -1, and its name there."""

    layer: int
    name: str

    def shifted(self, by: int) -> ParamId:
        return self if self.layer < 0 else ParamId(self.layer + by, self.name)


@dataclass(frozen=True)
class Spent:
    """Work on the device."""

    phase: str
    flops: int
    ns: int

    def shifted(self, by: int) -> Spent:
        return self


@dataclass(frozen=True)
class Taken:
    block: BlockId
    nbytes: int

    def shifted(self, by: int) -> Taken:
        return Taken(self.block.shifted(by), self.nbytes)


@dataclass(frozen=True)
class Freed:
    block: BlockId

    def shifted(self, by: int) -> Freed:
        return Freed(self.block.shifted(by))


@dataclass(frozen=True)
class Read:
    """Forward reads the parameter for the first time."""

    param: ParamId

    def shifted(self, by: int) -> Read:
        return Read(self.param.shifted(by))


@dataclass(frozen=True)
class Gradient:
    """Backward has finished the gradient of a parameter, which lies in a block that it has taken before."""

    param: ParamId
    block: BlockId
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    placements: tuple[object, ...] = ()  # where it is a DTensor, of which the rest says the local part

    def shifted(self, by: int) -> Gradient:
        return replace(self, param=self.param.shifted(by), block=self.block.shifted(by))


Event = Spent | Taken | Freed | Read | Gradient
Parts = dict[Part, list[Event]]  # in the order they ran
