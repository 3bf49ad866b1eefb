"""Who is to blame: signs of life over a store, without processes."""

from __future__ import annotations

import re
import time

import pytest
import torch.distributed as dist

from zofftk.ranks import watch as watches
from zofftk.ranks.watch import Watch


class Store:
    """A store that can go away, as with the process that holds it."""

    def __init__(self):
        self.inner, self.is_gone = dist.HashStore(), False

    def __getattr__(self, name):
        if name == "clone":
            raise AttributeError(name)
        if self.is_gone:
            raise RuntimeError("connection reset")
        return getattr(self.inner, name)


@pytest.fixture
def ranks(monkeypatch):
    """Watches of ranks 4, 6 and 7 of a world."""
    for name, value in (("INTERVAL_S", 0.02), ("PATIENCE_S", 0.3), ("LEAST_S", 0.15)):
        monkeypatch.setattr(watches, name, value)
    store = Store()
    made = {rank: Watch(store, rank, (4, 6, 7)) for rank in (4, 6, 7)}
    for watch in made.values():
        watch.begin("step 3")
    yield store, made
    for watch in made.values():
        watch.close()


def await_signs():
    time.sleep(0.1)


def die(watch):
    watch._end.set()
    watch._thread.join()


def test_the_dead_rank_is_named_by_its_number_in_the_world(ranks):
    _, by_rank = ranks
    await_signs()
    die(by_rank[6])
    error = by_rank[4].blame(RuntimeError("Connection closed\nand more"))
    assert re.fullmatch(
        r"rank 4 cannot go on at step 3: rank 6 has died or cannot be reached; it was last heard of at step 3 "
        r"\(RuntimeError: Connection closed\)",
        str(error),
    )


def test_who_failed_after_it_and_ended_is_not_named(ranks):
    _, by_rank = ranks
    die(by_rank[7])
    by_rank[4].blame(RuntimeError("a"))
    die(by_rank[4])
    assert "rank 7 has died" in str(by_rank[6].blame(RuntimeError("b")))


def test_the_verdict_outlives_the_store(ranks):
    store, by_rank = ranks
    die(by_rank[7])
    by_rank[4].blame(RuntimeError("a"))
    by_rank[6]._end.wait(0.2)  # it hears of it meanwhile
    store.is_gone = True
    assert "rank 6 cannot go on at step 3: rank 7 has died" in str(by_rank[6].blame(RuntimeError("b")))


def test_a_store_that_goes_while_we_look_is_not_to_blame(ranks, monkeypatch):
    _, by_rank = ranks
    die(by_rank[7])
    looks = []

    def read(self):
        looks.append(0)
        if len(looks) > 2:
            raise RuntimeError("connection reset")
        return read_others(self)

    read_others = Watch._read_others
    monkeypatch.setattr(Watch, "_read_others", read)
    monkeypatch.setattr(watches, "LEAST_S", 0.0)
    assert "rank 7 has died" in str(by_rank[6].blame(RuntimeError("b")))


def test_a_store_that_is_gone_is_named(ranks):
    store, by_rank = ranks
    store.is_gone = True
    assert "rank 6 has lost the process that holds torch.distributed's store (rank 0, or the launcher)" in str(
        by_rank[6].blame(RuntimeError("b"))
    )


def test_the_place_is_told_before_the_next_sign_is_due(ranks, monkeypatch):
    _, by_rank = ranks
    monkeypatch.setattr(watches, "INTERVAL_S", 0.4)
    await_signs()
    by_rank[6].begin("step 4")
    time.sleep(0.2)
    by_rank[6].done()
    time.sleep(0.2)
    die(by_rank[6])
    assert "it was last heard of after step 4" in str(by_rank[4].blame(RuntimeError("a")))


def test_a_watch_that_is_forgotten_says_so(ranks):
    _, by_rank = ranks
    await_signs()
    by_rank.pop(6)
    await_signs()
    assert "rank 6 has dropped its optimizer, at step 3" in str(by_rank[4].blame(RuntimeError("a")))


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (
            "[/__w/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2710. "
            "This is typically caused by a remote worker crashing. GLHF!",
            "Connection closed by peer [127.0.0.1]:2710",
        ),
        (
            "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
            "Timed out waiting 5000ms for recv operation to complete",
        ),
        (
            "wait timeout after 5000ms, keys: /a/0\nException raised from doWait at",
            "wait timeout after 5000ms, keys: /a/0",
        ),
    ],
)
def test_the_reason_is_short_and_the_rest_stays_with_the_cause(ranks, text, short):
    _, by_rank = ranks
    die(by_rank[6])
    said = str(by_rank[4].blame(RuntimeError(text)))
    assert said.endswith(f"(RuntimeError: {short})")
