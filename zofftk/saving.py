"""`save` and `load`: dicts of state dicts in files that are there whole or not at all, and hold nothing that runs."""

from __future__ import annotations

import errno
import os
import stat
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from zofftk.atomic_file import replacing
from zofftk.errors import InputError
from zofftk.pending import is_pending

# By exact type: a subclass (an enum, a number of numpy's) is written as itself, and a safe load refuses it.
_VALUES = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_LISTS = {list, tuple, set}
_DICTS = {dict, OrderedDict, Counter}
_TENSORS = {torch.Tensor, torch.nn.Parameter}


def save(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write state dicts and plain values to `path`, as `torch.save` does, whole or not at all.

    What was at `path` before stays until the new file is complete and on the disk; it stays whatever ends the process
    in between. A symbolic link is followed. `load` and `torch.load(path, weights_only=True)` read it.

    Args:
        path: where to; folders that are missing are made.
        content: e.g. `{"model": model.state_dict(), "optimizer": opt.state_dict(), "epoch": 3}`: dicts, lists and
            tuples of tensors, numbers, strings, bytes, dtypes and None.

    Raises:
        TypeError: something in it is of another kind, which `load` would refuse; names its keys. No file is touched.
        OSError: the file cannot be written; names `path`.

    Source: `torch.save`; what may be in it is what `torch.load(weights_only=True)` allows.
    """
    if type(content) not in _DICTS:
        raise TypeError(f"save expects a dict of state dicts and plain values, got {type(content).__name__}")
    check_plain(content, "content")
    with replacing(Path(path)) as file:
        writer: Any = _Writer(file)
        try:
            torch.save(content, writer)
        except RuntimeError:
            if writer.error is None:
                raise
            raise writer.error from None


def load(path: str | os.PathLike[str], *, check: bool = True) -> Any:
    """What `save`, or `torch.save`, has written to `path`, on the CPU; runs no code from the file.

    The file is mapped: a value takes memory when it is read, and gives it back when an optimizer of this package has
    taken it over. So do not change the file while its content is in use; `save` puts another in its place, which is
    fine.

    Args:
        path: the file.
        check: compare the checksums first, which reads the file once. Without it, a flipped bit in a weight goes
            unseen.

    Raises:
        OSError: there is no such file, or it cannot be read.
        InputError: it is truncated, damaged, not a file of `torch.save`, or needs code to be loaded; a ValueError.

    Source: `torch.load` with `weights_only=True, mmap=True`.
    """
    path = Path(path)
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    with path.open("rb") as file:
        # Torch opens a file by its name more than once; `save` may put another in its place in between.
        fixed = f"/proc/self/fd/{file.fileno()}"
        try:
            if check:
                _check_bytes(file)
            return torch.load(
                fixed if os.path.exists(fixed) else path, map_location="cpu", weights_only=True, mmap=True
            )
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        except Exception as error:  # the parsers of zip, deflate and pickle raise what they like on damaged bytes
            raise InputError(
                "expected a file of zofftk.save or torch.save with tensors and plain values alone; "
                f"{path} is truncated, damaged or not one ({str(error).strip().partition(chr(10))[0]})"
            ) from None


def _check_bytes(file: BinaryIO) -> None:
    """torch.load does not compare checksums."""
    with zipfile.ZipFile(file) as archive:
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")


def check_plain(value: Any, where: str) -> None:
    """Raises TypeError, with the keys after `where`, for what a safe load would refuse."""
    for name, found in _unsafe(value, where, ()):
        raise TypeError(f"cannot save {name}, {_kind(found)}: expected tensors and plain values, which load safely")


def _unsafe(value: Any, where: str, within: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """What a safe load would refuse, with the keys that lead to it."""
    kind = type(value)
    if kind in _VALUES:
        return
    if isinstance(value, torch.Tensor):
        if not _is_plain(value):
            yield where, value
    elif kind not in _LISTS | _DICTS or id(value) in within:
        yield where, value
    elif kind in _DICTS:
        for key, item in value.items():
            yield from _unsafe(key, f"the key {key!r} of {where}", ())
            yield from _unsafe(item, f"{where}[{key!r}]", (*within, id(value)))
    else:
        for number, item in enumerate(value):
            yield from _unsafe(item, f"{where}[{number}]", (*within, id(value)))


def _is_plain(tensor: torch.Tensor) -> bool:
    if is_pending(tensor):
        tensor.detach()  # has its new value arrive, which makes it what it was
    with torch._C.DisableTorchFunctionSubclass():
        return type(tensor) in _TENSORS and tensor.device.type != "meta" and not _attributes(tensor)


def _attributes(tensor: torch.Tensor) -> list[str]:
    """Of a tensor's own attributes those that cannot be saved; they are written with it."""
    return [name for name, value in vars(tensor).items() if list(_unsafe(value, name, ()))]


def _kind(value: Any) -> str:
    if type(value) in _LISTS | _DICTS:
        return f"a {type(value).__name__} that contains itself"
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        return "a tensor on the meta device, which has no values"
    if type(value) in _TENSORS:
        return f"a tensor with the attribute {_attributes(value)[0]!r}"
    spread = ", which zofftk.save_sharded saves" if hasattr(value, "__create_write_items__") else ""
    return f"of type {type(value).__module__}.{type(value).__qualname__}{spread}"


class _Writer:
    """Remembers why a write failed: torch.save turns a full disk into a RuntimeError that does not say so."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()
