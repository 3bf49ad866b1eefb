"""One rank's part in loading a checkpoint folder: everything is compared before anything is changed."""

from __future__ import annotations

import dataclasses
import errno
import io
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from zofftk import carried
from zofftk.errors import InputError
from zofftk.ranks.slices import is_sliced
from zofftk.sharding import atomic_folder, manifest
from zofftk.sharding.files import METADATA, ChunkReader


def whole_checkpoint(folder: Path) -> Path:
    """Where the checkpoint `folder` is. Raises FileNotFoundError where there is none."""
    place = atomic_folder.found(folder)
    if not (place / METADATA).is_file():
        raise FileNotFoundError(errno.ENOENT, f"there is no checkpoint: expected a folder with {METADATA}", str(folder))
    return place


class Loading:
    """The steps of a load, in their order. `content`, the wanted state dicts, is changed by the last two alone.

    `optimizers`: of these keys, a parameter whose state is not there had none when the checkpoint was written.
    """

    def __init__(self, place: Path, content: dict[str, Any], optimizers: Sequence[str] = ()) -> None:
        self.place = place
        self.content = content
        self._optimizers = optimizers
        self._reader = ChunkReader(place)
        self._planner = _Planner()

    def verify(self, rank: int, size: int, *, checksums: bool) -> None:
        """The files are there and undamaged; checksums are compared of this rank's share of them."""
        files = manifest.read(self.place)
        if files is not None:
            manifest.verify(self.place, files, checksums=checksums, rank=rank, size=size)
        self._metadata = self._reader.read_metadata()
        if files is None:  # torch's own
            _check_lengths(self.place, self._metadata)

    def plan(self, *, strict: bool) -> None:
        """What is wanted is there, in its shape."""
        for key in self._optimizers:
            states, saved = self.content[key]["state"], self._metadata.state_dict_metadata
            for number in list(states):
                if not any(name.startswith(f"{key}.state.{number}.") for name in saved):
                    del states[number]
            for number, group in enumerate(self.content[key]["param_groups"]):
                if f"{key}.param_groups.{number}.{carried.KEY}" in saved:
                    group.setdefault(carried.KEY, None)  # saved by one with another update or loss scale
        self._planner.set_up_planner(_with_own_containers(self.content), self._metadata)
        _check_fits(self._planner, self._metadata, set(map(str, self.content)), strict, self.place, self._copied())
        self._reader.set_up_storage_reader(self._metadata, False)
        self._plan = self._reader.prepare_local_plan(self._planner.create_local_plan())

    def _copied(self) -> tuple[str, ...]:
        """Names begin so of what an optimizer's groups hold a copy of, so that nobody has to ask for it."""
        return tuple(f"{key}.{entry}." for key in self._optimizers for entry in carried.ENTRIES)

    def read_values(self) -> None:
        """Values that are not tensors, first: only reading shows whether they need code to be loaded."""
        self._read(LoadItemType.BYTE_IO)
        for path, value in self._planner.values:
            _put(self.content, path, value)

    def read_tensors(self) -> None:
        self._read(LoadItemType.TENSOR)
        # What is written into a slice leaves no trace on its DTensor, where the parameter's optimizer looks for one.
        torch.autograd.graph.increment_version([v for v in self._planner.state_dict.values() if is_sliced(v)])

    def _read(self, kind: LoadItemType) -> None:
        items = [item for item in self._plan.items if item.type == kind]
        plan: LoadPlan = dataclasses.replace(self._plan, items=items)
        self._reader.read_data(plan, self._planner).wait()


class _Planner(DefaultLoadPlanner):
    """Keeps values that are not tensors until all have been read."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[tuple[Any, ...], Any]] = []

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise InputError(f"{name} in the checkpoint is no plain value, or damaged ({reason})") from None
        self.values.append((self.mappings[name], loaded))


def _check_lengths(place: Path, metadata: Metadata) -> None:
    """The files are long enough for what is said to be in them."""
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, nbytes in sorted(needed.items()):
        path = place / name
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "this file of the checkpoint is missing", str(path))
        if path.stat().st_size < nbytes:
            raise InputError(f"{path} is truncated: expected {nbytes} bytes, it has {path.stat().st_size}")


def _check_fits(
    planner: _Planner, metadata: Metadata, keys: set[str], strict: bool, place: Path, copied: tuple[str, ...]
) -> None:
    wanted, saved = planner.state_dict, metadata.state_dict_metadata
    for name, value in wanted.items():
        if name not in saved:
            raise InputError(f"the checkpoint {place} has no {name}")
        entry = saved[name]
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if isinstance(value, torch.Tensor) != is_tensor:
            kinds = ("a tensor", "no tensor") if is_tensor else ("no tensor", "a tensor")
            raise InputError(f"{name} is {kinds[0]} in the checkpoint {place}, and {kinds[1]} where it is to go")
        if isinstance(entry, TensorStorageMetadata) and isinstance(value, torch.Tensor):
            if entry.size != value.shape:
                shapes = f"{tuple(entry.size)} in the checkpoint {place}, expected {tuple(value.shape)}"
                raise InputError(f"{name} has shape {shapes}")
            if (found := sum(prod(chunk.sizes) for chunk in entry.chunks)) != entry.size.numel():
                raise InputError(f"the checkpoint {place} has {found} of the {entry.size.numel()} elements of {name}")
    if strict:
        paths = metadata.planner_data or {}
        for name in saved:
            if name not in wanted and str(paths.get(name, (name,))[0]) in keys and not name.startswith(copied):
                raise InputError(f"nothing asks for {name} in the checkpoint {place}: give a tensor, or strict=False")


def _with_own_containers(value: Any, name: str = "") -> Any:
    """The planner puts what it likes into dicts and lists, and memory in the place of a tensor that has none."""
    if isinstance(value, Mapping):
        return {key: _with_own_containers(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        raise InputError(f"{name[1:]} is to go into a tensor on the meta device, expected one with memory")
    if isinstance(value, list):
        return [_with_own_containers(item, f"{name}.{number}") for number, item in enumerate(value)]
    return value


def _put(content: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value where `path`, whose keys of dicts are strings whatever they were, leads."""
    for step in path[:-1]:
        content = content[_key(content, step)]
    content[_key(content, path[-1])] = value


def _key(container: Any, step: Any) -> Any:
    if not isinstance(container, Mapping) or step in container:
        return step
    return next(key for key in container if str(key) == step)
