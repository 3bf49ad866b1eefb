"""Where a run writes, checked before it starts and never over an earlier run."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from zofftk.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """A run's folder, and its checkpoint: every `save_every` steps where given, at the end where `save` is given."""

    folder: Path
    save: Path | None = None
    save_every: int | None = None

    def __post_init__(self) -> None:
        if self.save_every is not None and self.save_every < 1:
            raise InputError(f"--save-every: expected a whole number of at least 1, got {self.save_every}")
        if (self.folder / "record.json").exists():
            raise InputError(f"--name: expected a new name, {self.folder} already holds a run")
        if self.save is not None and self.save.is_dir():
            raise InputError(f"--save: expected a file, {self.save} is a folder")
        _check_writable(self.folder, "--out")
        _check_writable(self.checkpoint.parent, "--save")

    @property
    def checkpoint(self) -> Path:
        return self.save or self.folder / "checkpoint.pt"


def run_folder(parent: Path, name: str | None, preset: str) -> Path:
    if name is None:
        return parent / f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    if name in ("", "..") or name != Path(name).name:
        raise InputError(f"--name: expected the name of a folder without its parents, got {name!r}")
    return parent / name


def _check_writable(folder: Path, option: str) -> None:
    """A run must not find out at its end that it cannot write."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"{option}: expected a folder, {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise InputError(f"{option}: expected a folder to write in, {existing} is not writable")
