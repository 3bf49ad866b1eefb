"""Sizes and checksums of a checkpoint folder's files. Torch's distributed checkpoints have none that are compared."""

from __future__ import annotations

import errno
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zofftk.errors import InputError

NAME = "checksums.json"
BLOCK_BYTES = 8 << 20  # what of a file is in memory while it is read


@dataclass(frozen=True)
class FileSum:
    nbytes: int
    crc32: int


def write(folder: Path, files: dict[str, FileSum]) -> None:
    """Write `files`, by name, into `folder`, and to the disk.

    Raises OSError where a file is not there, or in another size; names it.
    """
    for name, file in files.items():
        path = folder / name
        if not path.is_file():
            fault = "the first rank does not see it: expected a file system that all ranks share"
            raise FileNotFoundError(errno.ENOENT, fault, str(path))
        if path.stat().st_size != file.nbytes:
            raise OSError(errno.EIO, f"expected the {file.nbytes} bytes that were written", str(path))
    entries = {name: {"bytes": file.nbytes, "crc32": f"{file.crc32:08x}"} for name, file in sorted(files.items())}
    with (folder / NAME).open("w") as out:
        json.dump({"format": 1, "files": entries}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def read(folder: Path) -> dict[str, FileSum] | None:
    """The files by name; None for a folder without a manifest. Raises InputError where it is damaged."""
    try:
        text = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return None
    try:
        content: dict[str, Any] = json.loads(text)["files"]
        return {name: FileSum(int(entry["bytes"]), int(entry["crc32"], 16)) for name, entry in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / NAME} is damaged, expected the checksums of the other files ({error})") from None


def verify(folder: Path, files: dict[str, FileSum], *, checksums: bool, rank: int = 0, size: int = 1) -> None:
    """Compare all sizes, and the checksums of this rank's share of the files, which are read for it.

    Raises:
        FileNotFoundError: a file is missing; names it.
        InputError: a file has another size or other content; names it.
    """
    for number, (name, file) in enumerate(sorted(files.items())):
        path = folder / name
        try:
            nbytes = path.stat().st_size
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "this file of the checkpoint is missing", str(path)) from None
        if nbytes != file.nbytes:
            raise InputError(f"{path} is truncated or damaged: expected {file.nbytes} bytes, it has {nbytes}")
        if checksums and number % size == rank and _crc32(path) != file.crc32:
            raise InputError(f"{path} is damaged: expected the checksum {file.crc32:08x} of what was written")


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
