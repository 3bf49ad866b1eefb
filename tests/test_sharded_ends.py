"""Ranks that do not come, hang or die where others save, load or gather: those end in time, and name them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zofftk
from tests.rank_processes import run_ranks
from tests.sharding import sharded, whole
from zofftk.errors import RankError
from zofftk.sharding import files
from zofftk.sharding import full as sharded_full
from zofftk.sharding.full import gather_full
from zofftk.sharding.saving import load_sharded, save_sharded

MARGIN_S = 8  # a look at the others' signs takes 2.5 s


def trained(**options):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    opt = zofftk.OffloadAdamW(model.parameters(), **options)
    model(torch.ones(1, 5)).sum().backward()
    opt.step()
    opt.zero_grad()
    return model, opt


def assert_ends(call, because, limit_s):
    start = time.monotonic()
    with pytest.raises(RankError, match=because):
        call()
    assert time.monotonic() - start < limit_s + MARGIN_S


def keep_out(rank, call, because, limit_s):
    """Rank 0 makes the call alone, while the other lives on."""
    if rank == 0:
        assert_ends(call, because, limit_s)
        dist.distributed_c10d._get_default_store().set("seen", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["seen"])


def test_a_rank_that_saves_alone_ends_in_time(tmp_path):
    def run(rank):
        model, opt = trained(rank_timeout_s=2)
        keep_out(rank, lambda: save_sharded({"m": model, "o": opt}, tmp_path / "ckpt"), "rank 1 has never begun", 2)
        keep_out(rank, lambda: gather_full(opt.state_dict()), "rank 1 has never begun", 2)

    run_ranks(2, run)
    assert not os.listdir(tmp_path)


def test_a_rank_that_comes_once_and_not_again(tmp_path):
    def run(rank):
        model, opt = trained(rank_timeout_s=20)
        pairs: list[Any] = [dist.new_group([0, 1]) for _ in range(3)]
        content = {"m": model, "o": opt}
        save_sharded(content, tmp_path / "ckpt", pairs[0])
        load_sharded(content, tmp_path / "ckpt", pairs[1])
        gather_full(opt.state_dict(), pairs[2])
        late = "rank 1 is alive but does not come, it is after"
        keep_out(
            rank,
            lambda: save_sharded({"o": opt.state_dict()}, tmp_path / "ckpt", pairs[0], timeout_s=1),
            f"save_sharded: {late} save_sharded",
            1,
        )
        if rank:
            dist.distributed_c10d._get_default_store().wait(["load"])
        else:
            assert_ends(lambda: load_sharded(content, tmp_path / "ckpt", pairs[1], timeout_s=1), f"{late} load", 1)
            call = lambda: opt.state_dict()["state"][0]["exp_avg"].full(pairs[2])  # noqa: E731
            opt.state[model.weight]["exp_avg"].timeout_s = 1
            assert_ends(call, f"gather_full: {late} gather_full", 1)
            dist.distributed_c10d._get_default_store().set("load", "")

    run_ranks(2, run)


def test_long_work_is_waited_for_and_a_stopped_rank_is_not(tmp_path, monkeypatch):
    def run(rank):
        state = {"value": sharded(whole((50, 40), 0), rank, 3, 12)}
        write, stops = files._Summed.write, []

        def slow(stream, data):
            if rank == 1 and not stops:
                stops.append(1)
                time.sleep(4)
            return write(stream, data)

        monkeypatch.setattr(files._Summed, "write", slow)
        save_sharded(state, tmp_path / "ckpt", timeout_s=2)

        def stopped(stream, data):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return write(stream, data)

        monkeypatch.setattr(files._Summed, "write", stopped)
        try:
            assert_ends(lambda: save_sharded(state, tmp_path / "ckpt", timeout_s=2), "rank 1 has died or cannot", 2)
        finally:
            pids = dist.distributed_c10d._get_default_store()
            pids.set(f"ended {rank}", "")
            pids.wait(["ended 0", "ended 2"])
            os.kill(int(pids.get("pid")), signal.SIGKILL)

    def work(rank):
        if rank == 1:
            dist.distributed_c10d._get_default_store().set("pid", str(os.getpid()))
        run(rank)

    run_ranks(3, work, killed=(1,))


def test_ranks_that_die_where_others_load_and_gather_are_named(tmp_path, monkeypatch):
    def run(rank):
        value, mine = whole((50, 40), 0), min(rank, 1)
        loading: Any = dist.new_group([0, 2])
        gathering: Any = dist.new_group([0, 1])
        if rank != 1:
            save_sharded({"value": value}, tmp_path / "ckpt", loading)
        if rank == 2:
            monkeypatch.setattr(files.ChunkReader, "read_data", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if rank != 1:
            load = lambda: load_sharded({"value": value}, tmp_path / "ckpt", loading)  # noqa: E731
            assert_ends(load, "load_sharded: rank 2 has died", 2)
        if rank == 1:
            monkeypatch.setattr(sharded_full, "_owners", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        states = {"value": sharded(value, mine, 2, 12)}
        assert_ends(lambda: gather_full(states, gathering), "gather_full: rank 1 has died", 2)

    run_ranks(3, run, killed=(1, 2))
