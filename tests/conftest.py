"""Every test starts from the same seed and leaves no engine thread behind."""

from __future__ import annotations

import gc
import threading

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread():
    """The models here are tiny: a second OpenMP thread only spins, for seconds where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_finish():
    """What the libraries have made on import stays: the collections after each test need not go through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption("--programs", type=int, default=160, help="how many random programs to run")
    parser.addoption("--program", type=int, help="the seed of the only random program to run")


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture
def no_threads_left(request):
    """After a test that passed, the engine's threads are those that were there before."""

    def ours():
        return {thread for thread in threading.enumerate() if thread.name.startswith("zofftk-")}

    before = ours()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback holds the engine
    if ours() - before:  # of an optimizer that was dropped, unless they are about to end
        gc.collect()
    for thread in ours() - before:
        thread.join(timeout=5)
        assert not thread.is_alive(), thread.name


@pytest.fixture
def at_once(monkeypatch):
    """Small gradients are taken one by one, as large ones are."""
    monkeypatch.setattr("zofftk.hooks.INBOX_SIZE", 1)
