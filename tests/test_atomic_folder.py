"""Folders that are replaced whole, whatever ends the process, with and without an exchange of names."""

from __future__ import annotations

import os
from itertools import count

import pytest

from zofftk.sharding import atomic_folder
from zofftk.sharding.atomic_folder import begin, commit, found


def is_ours(name):
    return name in ("a", "b")


def put(folder, text):
    """A folder whose two files hold `text`."""
    temporary = begin(folder, is_ours)
    for name in ("a", "b"):
        (temporary / name).write_text(text)
    commit(temporary, folder)


def content(folder):
    return [(found(folder) / name).read_text() for name in ("a", "b")]


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(atomic_folder, "_exchange_names", lambda first, second: False)


@pytest.mark.usefixtures("way")
def test_a_folder_is_made_and_replaced_and_nothing_is_left_beside_it(tmp_path):
    folder = tmp_path / "new" / "[a]*"
    for text in ("first", "second", "third"):
        put(folder, text)
        assert content(folder) == [text] * 2
        assert os.listdir(folder.parent) == ["[a]*"]
    (tmp_path / "empty").mkdir()
    put(tmp_path / "empty", "text")
    (tmp_path / "link").symlink_to(folder)
    put(tmp_path / "link", "through the link")
    assert (tmp_path / "link").is_symlink()
    assert content(folder) == ["through the link"] * 2


@pytest.mark.usefixtures("way")
def test_wherever_the_process_is_killed_one_whole_folder_is_found(tmp_path, monkeypatch):
    """In a child, the n-th system call that changes a name, or removes or syncs a file, is its last."""
    folder = tmp_path / "folder"
    put(folder, "old")
    for last in count(1):
        child = os.fork()
        if not child:
            try:
                die_after(last, monkeypatch)
                put(folder, f"new {last}")
            finally:
                os._exit(0)
        ended = os.waitpid(child, 0)[1]
        assert content(folder) in (["old"] * 2, [f"new {last}"] * 2), last
        put(folder, "old")
        assert os.listdir(tmp_path) == ["folder"]
        if ended == 0:
            break
    assert last > 5


def die_after(calls, monkeypatch):
    counted = count(1)

    def dying(call):
        def instead(*args, **kwargs):
            result = call(*args, **kwargs)
            if next(counted) == calls:
                os._exit(1)
            return result

        return instead

    for name in ("rename", "unlink", "rmdir", "mkdir", "fsync"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    monkeypatch.setattr(atomic_folder, "_exchange_names", dying(atomic_folder._exchange_names))


def test_what_is_not_ours_is_not_replaced(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"it holds 'thesis.tex', which would be lost: .*/full"):
        begin(tmp_path / "full", is_ours)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="expected a folder or nothing"):
        begin(tmp_path / "file", is_ours)
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]


def test_a_file_system_that_exchanges_no_names(tmp_path):
    (tmp_path / "within").mkdir()
    assert not atomic_folder._exchange_names(tmp_path, tmp_path / "within")  # EINVAL, as such ones say
    with pytest.raises(FileNotFoundError):
        atomic_folder._exchange_names(tmp_path / "nothing", tmp_path)
