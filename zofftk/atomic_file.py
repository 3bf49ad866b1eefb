"""Files that are there whole or not at all."""

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

OTHER_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link to itself",
}
# Of a temporary's name, which must not become longer than the file system allows where the file's own does not.
KEPT_OF_NAME = 40
MARK = ".zofftk-partial"  # ends it


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a neighbour of `path` for writing; it takes the name `path` only after the block ended without an error.

    Follows a symbolic link, also one to nothing yet. An OSError names `path`.
    """
    try:
        with _replacing(replaceable(path)) as file:
            yield file
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def replaceable(path: Path) -> Path:
    """Where `path` leads, if a file can be put there; raises OSError for a folder, pipe, device or socket."""
    target = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        kind = stat.S_IFMT(target.lstat().st_mode)
        if kind != stat.S_IFREG:
            raise OSError(errno.EINVAL, f"expected a file, it is {OTHER_KINDS.get(kind, 'something else')}", str(path))
    return target


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    descriptor, temporary, lock = _open_temporary(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            # Without this, a power cut after the rename could leave the new name on unwritten data.
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(lock)
    _sync_folder(path.parent)


def _open_temporary(path: Path) -> tuple[int, str, int]:
    """A new neighbour of `path`: its descriptor, its name, and a descriptor that keeps it locked until it is closed."""
    while True:
        descriptor, temporary = tempfile.mkstemp(MARK, _prefix(path), path.parent)
        with suppress(OSError):  # a file system without locks: its leftovers stay
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # else another save has taken it for a leftover before it was locked
            return descriptor, temporary, os.dup(descriptor)
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Temporaries of `path` that nobody writes to any more: their process was killed, which gave back its lock."""
    for name in os.listdir(path.parent):
        if not (name.startswith(_prefix(path)) and name.endswith(MARK)):
            continue
        with suppress(OSError):  # it is locked, or has just got its final name
            descriptor = os.open(path.parent / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path.parent / name)
            finally:
                os.close(descriptor)


def _prefix(path: Path) -> str:
    return f".{path.name[:KEPT_OF_NAME]}."


def _sync_folder(folder: Path) -> None:
    """Without this, a power cut could bring the old file back."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
