"""Folders that are there whole or not at all.

A new folder is written under a neighbouring name and then exchanged with what is there, in one rename. File systems
that cannot exchange two names get two renames, with the previous folder at a name of its own in between, where
`found` and the next `begin` look for it. So whatever ends the process, there is a whole folder that is found.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD = -100  # of fcntl.h: paths are relative to where the process is
_RENAME_EXCHANGE = 2  # of linux/fs.h


def begin(folder: Path, is_ours: Callable[[str], bool]) -> Path:
    """A new empty folder beside `folder`, for what is to be put in its place. Follows symbolic links.

    Args:
        folder: where to; missing parents are made. What an earlier process has left half-written there is removed.
        is_ours: whether an entry of that name may be in a folder that is replaced.

    Raises:
        OSError: `folder` is something else than a folder, or holds what is not ours; or the file system's error.
    """
    target = _target(folder)
    previous = _previous(target)
    if previous.is_dir() and not target.exists():
        os.rename(previous, target)
    if os.path.lexists(target) and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "expected a folder or nothing", str(folder))
    if target.is_dir() and (others := sorted(name for name in os.listdir(target) if not is_ours(name))):
        raise FileExistsError(
            errno.EEXIST, f"expected a checkpoint or nothing, it holds {others[0]!r}, which would be lost", str(folder)
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f"{glob.escape(_prefix(target))}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if previous.is_dir():
        shutil.rmtree(previous, ignore_errors=True)
    temporary = target.parent / f"{_prefix(target)}{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, folder: Path) -> None:
    """Put what `begin` gave, whose files are on the disk, in the place of `folder`; what was there is removed."""
    target = _target(folder)
    _sync(temporary)
    old = _exchange(temporary, target)
    _sync(target.parent)  # before the old one goes
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def found(folder: Path) -> Path:
    """Where the whole folder is."""
    target = _target(folder)
    previous = _previous(target)
    return previous if previous.is_dir() and not target.exists() else target


def _exchange(temporary: Path, target: Path) -> Path | None:
    """Where the old folder is now, if there was one."""
    if not target.exists():
        os.rename(temporary, target)
        return None
    if _exchange_names(temporary, target):
        return temporary
    previous = _previous(target)
    os.rename(target, previous)
    os.rename(temporary, target)
    return previous


def _exchange_names(first: Path, second: Path) -> bool:
    """False where it cannot be done here."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def _target(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


def _prefix(target: Path) -> str:
    return f".{target.name}.saving-"


def _previous(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


def _sync(folder: Path) -> None:
    """Its entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have nothing to do here
            raise
    finally:
        os.close(descriptor)
