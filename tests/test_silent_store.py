"""The process that holds the store is stopped: it is there, its sockets too, and it never answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.launched import free_port
from tests.rank_processes import run_ranks
from zofftk import OffloadAdamW
from zofftk.errors import RankError, StoreSilentError
from zofftk.ranks import patience
from zofftk.ranks.own_group import make_group
from zofftk.ranks.patience import PatientStore, within

TIMEOUT_S = 2.0
SILENT = r"the process that holds torch.distributed's store \(rank 0, or the launcher\) does not answer"


def meet(rank, port):
    """Over a store that rank 0 holds, as torch's own does without a launcher."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))


def built(model):
    return OffloadAdamW(model.parameters(), lr=1e-3, rank_timeout_s=TIMEOUT_S)


def step(opt, model):
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("moment", ["in the loop", "at construction"])
def test_the_rank_that_holds_it_is_named_in_time(moment):
    port = free_port()

    def work(rank):
        meet(rank, port)
        model = torch.nn.Linear(8, 8)
        opt = built(model) if moment == "in the loop" else None
        if opt:
            step(opt, model)
        dist.barrier()
        if rank == 0:
            time.sleep(0.2)  # the other has left the barrier
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        began = time.monotonic()
        with pytest.raises(RankError, match=SILENT):
            step(opt, model) if opt else built(model)
        return time.monotonic() - began

    assert took_of_the_other(work) < TIMEOUT_S + 5


def took_of_the_other(work):
    """What rank 1 returns; rank 0, which is stopped, is killed then."""
    number, took = os.pipe(), os.pipe()

    def then_kill(rank):
        if rank == 0:
            os.write(number[1], str(os.getpid()).encode())
            work(rank)
        os.write(took[1], str(work(rank)).encode())
        os.kill(int(os.read(number[0], 20)), signal.SIGKILL)

    run_ranks(2, then_kill, killed=(0,))
    return float(os.read(took[0], 100))


class Slow:
    def __init__(self):
        self.inner, self.goes_on = dist.HashStore(), threading.Event()
        self.goes_on.set()

    def __getattr__(self, name):
        if name == "clone":
            raise AttributeError(name)
        self.goes_on.wait()
        return getattr(self.inner, name)


def test_a_store_that_answers_again_is_used_again(monkeypatch):
    monkeypatch.setattr(patience, "ANSWER_S", 0.1)
    slow = Slow()
    store = PatientStore(slow)
    store.set("key", "first")
    assert store.get("key") == b"first"
    assert store.get("other") is None
    slow.goes_on.clear()
    with pytest.raises(StoreSilentError, match=SILENT):
        store.set("key", "second")
    began = time.monotonic()
    with pytest.raises(StoreSilentError):
        store.get("key")
    assert time.monotonic() - began < 0.05  # it is known by now
    slow.goes_on.set()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            assert store.get("key") == b"second"
            return
        except StoreSilentError:
            time.sleep(0.01)
    raise AssertionError("it never went on")


def test_what_fails_within_its_time_raises_its_own_error():
    with pytest.raises(KeyError, match="own"):
        within(5, lambda: {}["own"])
    with pytest.raises(StoreSilentError):
        within(0.05, lambda: time.sleep(1))


def test_a_thread_that_serves_no_store_ends():
    before = set(threading.enumerate())
    store = PatientStore(dist.HashStore())
    store.set("key", "value")
    (thread,) = set(threading.enumerate()) - before
    del store
    thread.join(5)
    assert not thread.is_alive()


AT_EXIT = """
    import sys, time, torch.distributed as dist
    from datetime import timedelta
    from zofftk.ranks.patience import PatientStore

    class Slow:
        def set(self, key, value):
            dist.HashStore().wait([key], timedelta(seconds=0.3))  # nobody sets it

    class LastOfAll:
        def __del__(self):
            time.sleep(1)  # the interpreter ends meanwhile, and the call is over

    store = PatientStore(Slow())
    store.post("key", "value")
    time.sleep(0.1)
    {drop}
    sys.last_of_all = LastOfAll()
    """


@pytest.mark.parametrize("drop", ["", "del store"], ids=["held", "dropped"])
def test_a_process_that_ends_during_a_call_does_not_abort(drop):
    script = textwrap.dedent(AT_EXIT).format(drop=drop)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_rank_that_comes_late_hears_who_has_given_up():
    def work(rank):
        if rank == 1:
            time.sleep(1.5)
        with pytest.raises(RankError) as raised:
            make_group((0, 1), timeout=timedelta(seconds=1))
        if rank == 0:
            time.sleep(2)
        return str(raised.value)

    first, late = run_ranks(2, work)
    assert re.match("rank 0 has waited 1 s for rank 1, which has not come to make their process group", first)
    assert re.fullmatch(
        "rank 1 has come to make a process group when rank 0 had given up, which has waited for it 1 s", late
    )
