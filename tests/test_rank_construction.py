"""Optimizers over ranks that are built, or not: who waits for whom, what is left of one that was not, and its name."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zofftk
from tests.parallel_model import mesh_of_sizes
from tests.rank_processes import run_ranks
from tests.test_ranks import mlp, optimizer, same_on_all_ranks
from zofftk.errors import RankError


def ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zofftk-")]


def test_a_failure_leaves_no_threads(tmp_path):
    def work(rank):
        other = nn.Linear(4, 5 if rank else 4)
        with pytest.raises(RankError, match="do not train the same parameters") as raised:
            optimizer(other, rank)
        assert ours() == [], "and the traceback is still there"
        assert raised.tb is not None
        mesh = mesh_of_sizes(1, 2)
        own = [
            nn.Parameter(dist.tensor.distribute_tensor(torch.ones(4 + 2 * rank), mesh["tp"], [dist.tensor.Shard(0)]))
        ]
        with pytest.raises(RankError, match="do not train the same parameters"):
            zofftk.OffloadAdamW(own)
        assert ours() == []

        model = mlp()  # the ranks are as good as before
        opt = optimizer(model, rank)
        model(torch.ones(1, 64)).sum().backward()
        opt.step()
        assert same_on_all_ranks(model.parameters())
        opt.close()
        assert ours() == []

    run_ranks(2, work)


def test_ranks_with_other_numbers_of_process_groups_meet(tmp_path):
    def work(rank):
        dist.new_group([0])  # nothing to the ranks that are not in it
        for _ in range(rank):
            dist.new_group([rank], use_local_synchronization=True)
        for turn in range(2):
            model = mlp()
            opt = optimizer(model, rank)
            model(torch.full((1, 64), 1.0 + rank)).sum().backward()
            opt.step()
            zofftk.save_sharded({"optimizer": opt}, tmp_path / str(turn))
            assert same_on_all_ranks(model.parameters())
            opt.close()
            dist.new_group([1])

    run_ranks(3, work)


def test_a_rank_that_does_not_come_is_named():
    def work(rank):
        if rank == 2:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankError, match=f"rank {rank} has waited 2 s for rank 2, which has not come"):
            optimizer(mlp(), rank, rank_timeout_s=2.0)
        assert time.monotonic() - began < 20
        assert ours() == []

    run_ranks(3, work, killed=(2,))
