"""Files that are there whole or not at all."""

import errno
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
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:KEPT_OF_NAME]}.")
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
