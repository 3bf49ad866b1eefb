"""Where a run writes, checked before it starts and never over an earlier run."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from zofftk.atomic_file import replaceable
from zofftk.errors import InputError

RESULTS = ("record.json", "loss.png", "timeline.json")


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """A run's folder, and its checkpoint: every `save_every` steps where given, at the end where `save` is given."""

    folder: Path
    save: Path | None = None
    save_every: int | None = None
    of_ranks: bool = False  # the checkpoint is a folder, to which many ranks write

    def __post_init__(self) -> None:
        if self.save_every is not None and self.save_every < 1:
            raise InputError(f"--save-every: expected a whole number of at least 1, got {self.save_every}")
        _check_folder(self.folder, "--out")
        if (self.folder / "record.json").exists():
            raise InputError(f"--name: expected a new name, {self.folder} already holds a run")
        if self.save is not None:
            target = self._check(self.save, "--save")
            folder = Path(os.path.realpath(self.folder))
            if target in (folder, *folder.parents, *(folder / name for name in RESULTS)):
                raise InputError(f"--save: expected a name that the run does not use itself, got {self.save}")
        elif self.save_every is not None:
            self._check(self.checkpoint, "--save-every")

    @property
    def checkpoint(self) -> Path:
        return self.save or self.folder / ("checkpoint" if self.of_ranks else "checkpoint.pt")

    def _check(self, path: Path, option: str) -> Path:
        return check_checkpoint_folder(path, option) if self.of_ranks else check_file(path, option)


def run_folder(parent: Path, name: str | None, preset: str) -> Path:
    if name is None:
        return parent / f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    if name in ("", "..") or name != Path(name).name:
        raise InputError(f"--name: expected the name of a folder without its parents, got {name!r}")
    if not name.isprintable():
        raise InputError(f"--name: expected printable characters, got {name!r}")
    return parent / name


def check_file(path: Path, option: str) -> Path:
    """Where the file `path` will be put; raises where that cannot be, so that no run finds out at its end."""
    try:
        target = replaceable(path)
    except OSError as error:
        raise InputError(f"{option}: {path}: {error.strerror}") from None
    _check_folder(target.parent, option)
    _check_length(target, target.parent, option)
    return target


def check_checkpoint_folder(path: Path, option: str) -> Path:
    """Where the folder `path` will be put: in the place of a checkpoint, or where nothing is."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not (target.is_dir() and (target / ".metadata").exists()):
            raise InputError(f"{option}: expected a checkpoint's folder or nothing, {path} is something else")
    except OSError as error:
        raise InputError(f"{option}: {path}: {error.strerror}") from None
    _check_folder(target.parent, option)
    _check_length(target, target.parent, option)
    return target


def _check_folder(folder: Path, option: str) -> None:
    """The folder is there and can be written in, or can be made."""
    try:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, in a folder that is there
        raise InputError(f"{option}: {folder}: {error.strerror}") from None
    if not existing.is_dir():
        raise InputError(f"{option}: expected a folder, {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise InputError(f"{option}: expected a folder to write in, {existing} is not writable")
    _check_length(folder.absolute() / max(RESULTS, key=len), existing, option)


def _check_length(path: Path, existing: Path, option: str) -> None:
    """What the system says only once the folders above a name are there."""
    existing = next(folder for folder in (existing, *existing.parents) if folder.exists())
    name_max, path_max = os.pathconf(existing, "PC_NAME_MAX"), os.pathconf(existing, "PC_PATH_MAX")
    for name in path.parts:
        if len(os.fsencode(name)) > name_max:
            raise InputError(f"{option}: expected names of at most {name_max} bytes, got {name!r}")
    if len(os.fsencode(path)) >= path_max:
        raise InputError(f"{option}: expected a path of less than {path_max} bytes, got {str(path)!r}")
