"""A tensor of which each rank holds some ranges of elements, as torch's distributed checkpoints read and write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils import _pytree

from zofftk.mapped import FileMappings
from zofftk.sharding.boxes import Box, Slice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

aten = torch.ops.aten


class Part(NamedTuple):
    """Elements [start, stop) of the tensor, in row-major order, one after another in this rank's memory."""

    start: int
    values: torch.Tensor  # of one dimension

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


class ShardedState(torch.Tensor):
    """A tensor of the full shape whose elements are spread over ranks; this rank's are views of its own memory.

    It is what a state dict holds of a sharded optimizer. `torch.distributed.checkpoint` saves and loads it as a tensor
    of `shape`, whatever the ranks' ranges: a checkpoint fits any number of ranks, and ordinary full tensors. Loading
    writes into the memory of `parts`. `detach`, `clone`, `deepcopy`, `zero_`, `empty_like`, `zeros_like`, conversions
    of the dtype, and `copy_` from a full tensor or one of the same ranges do what they do to a tensor; what would need
    elements of other ranks raises RuntimeError, and pickling and `torch.save` raise TypeError.

    Args:
        shape: of the full tensor.
        dtype: of all parts.
        parts: (start, values) of the ranges this rank holds, in row-major order of the full tensor: `values` are
            contiguous CPU tensors of one dimension, which are kept, not copied. None on a rank that holds nothing.
            Over all ranks, the ranges hold each element once; saving and gathering check that.
        within: (offsets, sizes) of the slice of the tensor that the parts are of, whose elements they then count in
            row-major order; tensor parallelism cuts tensors into such. None means the whole tensor.
        is_copy: another rank holds the same parts, and presents them where they are saved or gathered. This one only
            reads.
        timeout_s: how long ranks that gather or save it wait for one another, unless they say so; None: torch's.

    Raises:
        ValueError: a part is not of that kind, or lies outside of the tensor or over another part.

    Source: the protocol of `torch.distributed._checkpointable`, as torch 2.13's planners call it.
    """

    _parts: tuple[Part, ...]
    within: Slice
    is_copy: bool
    timeout_s: float | None

    @staticmethod
    def __new__(
        cls,
        shape: Iterable[int],
        dtype: torch.dtype,
        parts: Iterable[tuple[int, torch.Tensor]] = (),
        *,
        within: tuple[Iterable[int], Iterable[int]] | None = None,
        is_copy: bool = False,
        timeout_s: float | None = None,
    ) -> ShardedState:
        shape = torch.Size(shape)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        self.within, self.is_copy, self.timeout_s = _slice_of(shape, within), is_copy, timeout_s
        self._parts = _checked(self.within, dtype, parts)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise next(a for a in _pytree.tree_leaves((args, kwargs)) if isinstance(a, ShardedState))._refusal(func)
        return handler(func, *args, **(kwargs or {}))

    @property
    def parts(self) -> tuple[Part, ...]:
        """What this rank holds, by `start`; without empty ranges."""
        return self._parts

    @property
    def is_flat(self) -> bool:
        """The parts are ranges of the whole tensor's elements."""
        return self.within.sizes == tuple(self.shape)

    @property
    def numel_here(self) -> int:
        """Elements this rank holds."""
        return sum(part.values.numel() for part in self._parts)

    def full(self, group: ProcessGroup | None = None, *, dst: int | None = None) -> torch.Tensor | None:
        """The whole tensor, on the CPU, on every rank of `group`, or on its rank `dst` alone (None on the others).

        A collective: every rank of the group calls it. See `zofftk.gather_full`.
        """
        from zofftk.sharding.full import gather_full

        whole = gather_full({"the state": self}, group, dst=dst)
        return None if whole is None else whole["the state"]

    def read_from(self, full: torch.Tensor, files: FileMappings | None = None) -> None:
        """Copy this rank's elements out of `full`, a tensor of this shape; reads no others, and may be mapped.

        `files` keeps what was read of mapped files from piling up in memory; call its `release()` after the last one.
        """
        if full.shape != self.shape:
            raise ValueError(f"expected a tensor of shape {tuple(self.shape)}, got {tuple(full.shape)}")
        full, copy = full.detach(), (files or FileMappings()).copy
        for part in self._parts:
            if full.is_contiguous() and self.is_flat:
                copy(part.values, full.view(-1)[part.start : part.stop])
            else:  # a view of one dimension would be a copy of the whole
                for box in self.within.boxes(part.start, part.stop):
                    copy(_elements(part, box).view(box.sizes), full[box.slices])

    # -- torch.distributed.checkpoint: boxes of the full tensor to write, to read, and the memory of each -----------

    @cached_property
    def _boxes(self) -> dict[tuple[int, ...], tuple[Box, int]]:
        """The boxes of all parts by their offsets, each with its part's number."""
        return {
            box.offsets: (box, number)
            for number, part in enumerate(self._parts)
            for box in self.within.boxes(part.start, part.stop)
        }

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in ([] if self.is_copy else self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.numel() == 0:  # written by all, of which torch keeps one: a key without a chunk would not be saved
            return [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.size())]
        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b, _ in self._boxes.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of one box, in its shape."""
        if self.numel() == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        box, number = self._boxes[tuple(index.offset or ())]
        return _alone(_elements(self._parts[number], box)).view(box.sizes)

    # -- what a tensor is asked for besides ---------------------------------------------------------------------------

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"ShardedState(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"{self.numel_here} of {self.numel()} elements on this rank)"
        )

    def __copy__(self) -> ShardedState:
        return self.detach()  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled, nor saved by torch.save: the other elements are on other ranks. Save with "
            "zofftk.save_sharded or torch.distributed.checkpoint.save, or save what "
            "zofftk.gather_full makes of the state dict"
        )

    def _refusal(self, what: Any) -> RuntimeError:
        return RuntimeError(
            f"{what} needs a whole tensor, of which this is a part: {self!r}. "
            "full(group) gathers it, and .parts are this rank's elements"
        )

    @property
    def data(self) -> ShardedState:
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Any) -> None:
        raise self._refusal("assigning .data")

    # These go round the dispatcher, straight to the memory that is not there. (`data_ptr` is 0, which torch's
    # checkpoints take as the sign of such a tensor.)
    def tolist(self) -> Any:
        raise self._refusal("tolist")

    def numpy(self, *, force: bool = False) -> Any:
        raise self._refusal("numpy")

    def __dlpack__(self, **_: Any) -> Any:
        raise self._refusal("__dlpack__")

    def untyped_storage(self) -> Any:
        raise self._refusal("untyped_storage")

    def share_memory_(self) -> Any:
        raise self._refusal("share_memory_")

    def apply_(self, *_: Any) -> Any:
        raise self._refusal("apply_")


def _slice_of(shape: torch.Size, within: tuple[Iterable[int], Iterable[int]] | None) -> Slice:
    if within is None:
        return Slice((0,) * len(shape), tuple(shape))
    given = Slice(*map(tuple, within))
    fits = len(given.offsets) == len(given.sizes) == len(shape)
    if not fits or any(
        offset < 0 or size < 0 or offset + size > end
        for offset, size, end in zip(given.offsets, given.sizes, shape, strict=True)
    ):
        raise ValueError(f"expected a slice within a tensor of shape {tuple(shape)}, got {given}")
    return given


def _checked(within: Slice, dtype: torch.dtype, parts: Iterable[tuple[int, torch.Tensor]]) -> tuple[Part, ...]:
    numel = within.numel
    ordered = sorted((Part(*part) for part in parts), key=lambda part: part.start)
    stop = 0
    for part in ordered:
        values = part.values
        if values.dim() != 1 or values.dtype != dtype or values.device.type != "cpu" or not values.is_contiguous():
            raise ValueError(
                f"expected parts of one dimension, {dtype} and contiguous on the CPU, got {values.dtype} of shape "
                f"{tuple(values.shape)} and stride {values.stride()} on {values.device}"
            )
        if part.start < 0 or part.stop > numel:
            raise ValueError(f"elements [{part.start}, {part.stop}) are not in a tensor of shape {within.sizes}")
        if part.start < min(stop, part.stop):
            raise ValueError(f"elements [{part.start}, {min(stop, part.stop)}) are in two parts")
        stop = max(stop, part.stop)
    return tuple(part for part in ordered if part.values.numel())


def _elements(part: Part, box: Box) -> torch.Tensor:
    return part.values[box.start - part.start : box.stop - part.start]


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor whose storage is no larger: others are copied before they are written, and torch
    2.13 keeps the last copy of each key until the file is finished."""
    return torch.from_numpy(values.detach().view(torch.uint8).numpy()).view(values.dtype)


def _each_part(func: Callable[..., torch.Tensor], state: ShardedState, **options: Any) -> ShardedState:
    """The same ranges, each part as `func` makes it."""
    if torch.device(options.get("device") or "cpu").type != "cpu":
        raise state._refusal(f"moving to {options['device']}")
    parts = [(part.start, func(part.values, **options)) for part in state.parts]
    within = state.within.offsets, state.within.sizes
    dtype = options.get("dtype") or state.dtype
    kept: dict[str, Any] = {"within": within, "is_copy": state.is_copy, "timeout_s": state.timeout_s}
    return ShardedState(state.shape, dtype, parts, **kept)


def _new_empty(func: Any, state: ShardedState, size: Iterable[int], **options: Any) -> ShardedState:
    if tuple(size) != tuple(state.shape):
        raise state._refusal(func)
    return _each_part(torch.empty_like, state, **options)


def _copy(func: Any, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(into, ShardedState):
        raise source._refusal(func)  # type: ignore[attr-defined]
    if not isinstance(source, ShardedState):
        into.read_from(source)
        return into
    mine, others = ([(part.start, part.stop) for part in state.parts] for state in (into, source))
    if mine != others or into.shape != source.shape or into.within != source.within:
        raise ValueError(f"{into!r} and {source!r} hold different elements: save one and load the other")
    for part, other in zip(into.parts, source.parts, strict=True):
        part.values.copy_(other.values)
    return into


def _zero(func: Any, state: ShardedState) -> ShardedState:
    for part in state.parts:
        part.values.zero_()
    return state


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _each_part,
    aten.alias.default: _each_part,
    aten.clone.default: _each_part,
    aten.empty_like.default: _each_part,
    aten.zeros_like.default: _each_part,
    aten._to_copy.default: _each_part,
    aten.new_empty.default: _new_empty,
    aten.copy_.default: _copy,
    aten.zero_.default: _zero,
    aten.is_pinned.default: lambda _, state, *args: all(part.values.is_pinned() for part in state.parts),
}
