"""Files that are there whole or not at all: what a killed save leaves, and what reaches the disk."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time

import pytest

import zofftk
from zofftk import atomic_file
from zofftk.atomic_file import MARK, replacing

KILLED = """
import os, signal, sys
from pathlib import Path
from zofftk.atomic_file import replacing

with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()  # until it is killed, or told to go on
"""


def writer(path):
    """Another process in the middle of a save."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    return process


def end(process, number=None):
    if number is not None:
        process.send_signal(number)
    process.communicate(timeout=20)
    return process.returncode


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_the_next_save_removes_what_a_killed_one_has_left(tmp_path):
    path = tmp_path / "file.pt"
    assert end(writer(path), signal.SIGKILL) == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.startswith(".file.pt.")
    assert left.endswith(MARK)
    zofftk.save(path, {"a": 1})
    assert names(tmp_path) == ["file.pt"]


def test_a_save_leaves_another_live_one_alone_and_the_last_one_stands(tmp_path):
    path = tmp_path / "file.pt"
    other = writer(path)
    zofftk.save(path, {"a": 1})
    assert len(names(tmp_path)) == 2
    assert end(other) == 0
    assert path.read_bytes() == b"half"
    assert names(tmp_path) == ["file.pt"]


def test_only_temporaries_of_the_same_target_go(tmp_path):
    others = [
        ".file.pt.template",
        f".file.pt2.abcdefgh{MARK}",
        f"file.pt.abcdefgh{MARK}",
        ".file.pt.abcdefgh",
        ".other",
    ]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / f".file.pt.abcdefgh{MARK}").write_bytes(b"")
    (tmp_path / f".file.pt.ijklmnop{MARK}").symlink_to(tmp_path / ".other")
    zofftk.save(tmp_path / "file.pt", {"a": 1})
    assert names(tmp_path) == sorted([*others, "file.pt", f".file.pt.ijklmnop{MARK}"])


def test_a_temporary_that_is_taken_for_a_leftover_before_it_is_locked(tmp_path, monkeypatch):
    path, flock, taken = tmp_path / "file.pt", atomic_file.fcntl.flock, []

    def late(descriptor, how):
        if not taken:
            taken.append(names(tmp_path))
            os.unlink(tmp_path / taken[0][0])
        flock(descriptor, how)

    monkeypatch.setattr(atomic_file.fcntl, "flock", late)
    with replacing(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert names(tmp_path) == ["file.pt"]


def test_a_file_system_without_locks_keeps_what_is_there(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(atomic_file.fcntl, "flock", refuse)
    leftover = f".file.pt.abcdefgh{MARK}"
    (tmp_path / leftover).write_bytes(b"")
    zofftk.save(tmp_path / "file.pt", {"a": 1})
    assert names(tmp_path) == sorted([leftover, "file.pt"])


@pytest.mark.parametrize("error", [None, errno.EINVAL, errno.EIO])
def test_the_new_name_is_on_the_disk_before_save_returns(tmp_path, monkeypatch, error):
    synced, fsync = [], os.fsync

    def watch(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append("folder" if is_folder else "file")
        if is_folder:
            assert (tmp_path / "file.pt").exists()
            if error is not None:
                raise OSError(error, os.strerror(error))
        fsync(descriptor)

    monkeypatch.setattr(atomic_file.os, "fsync", watch)
    if error == errno.EIO:
        with pytest.raises(OSError, match=r"Input/output error: .*file\.pt"):
            zofftk.save(tmp_path / "file.pt", {"a": 1})
    else:
        zofftk.save(tmp_path / "file.pt", {"a": 1})
    assert synced == ["file", "folder"]
    assert zofftk.load(tmp_path / "file.pt") == {"a": 1}


MANY = """
import sys
from pathlib import Path
from zofftk.atomic_file import replacing

for i in range(60):
    with replacing(Path(sys.argv[1])) as file:
        file.write(bytes([i]) * 100_000)
"""


def test_many_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "file.pt"
    processes = [subprocess.Popen([sys.executable, "-c", MANY, path]) for _ in range(3)]
    deadline = time.monotonic() + 60
    assert [process.wait(max(0.1, deadline - time.monotonic())) for process in processes] == [0, 0, 0]
    assert path.read_bytes() == bytes([59]) * 100_000
    assert names(tmp_path) == ["file.pt"]
