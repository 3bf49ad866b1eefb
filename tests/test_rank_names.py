"""Messages name ranks by their numbers in the world, also those of a group within it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import zofftk
from tests.parallel_model import mesh_of_sizes
from tests.rank_processes import run_ranks
from zofftk.errors import InputError, RankError


def test_ranks_of_a_mesh_are_named_by_the_world(tmp_path):
    """Ranks 0 and 2, and 1 and 3, have the same slices; 0 and 1, and 2 and 3, those of the same parameters."""

    def work(rank):
        mesh = mesh_of_sizes(2, 2)
        data, (first, other) = mesh["dp"].get_local_rank(), mesh["dp"].mesh.tolist()

        def params(rows=4):
            whole = (torch.ones(rows, 4) for _ in range(2))
            return [nn.Parameter(distribute_tensor(one, mesh["tp"], [Shard(0)])) for one in whole]

        def fails(error, message):
            return pytest.raises(error, match=message.format(first, other))

        with fails(RankError, "ranks {} and {} do not train the same parameters"):
            zofftk.OffloadAdamW(params(4 + 2 * data))
        tp_first, tp_other = mesh["tp"].mesh.tolist()
        with pytest.raises(RankError, match=rf"ranks {tp_first} and {tp_other} do not train the same parameters"):
            zofftk.OffloadAdamW([*params(), *(nn.Parameter(torch.ones(1)) for _ in range(rank % 2))])

        own = params()
        opt = zofftk.OffloadAdamW(own)
        sum(p.sum() for p in own).backward()
        with fails(RankError, "rank {} makes a step where rank {} asks for a norm"):
            nn.utils.clip_grad_norm_(own, 1.0) if data else opt.step()
        opt.close()

        opt = zofftk.OffloadAdamW(own)
        own[data].sum().backward()
        with fails(RankError, "has a gradient on rank ({0} and none on rank {1}|{1} and none on rank {0})"):
            nn.utils.clip_grad_norm_(own, 1.0)
        opt.close()

        opt = zofftk.OffloadAdamW(own)
        group = mesh["dp"].get_group()
        with fails(InputError, "rank {} and rank {} hold different states"):
            zofftk.gather_full({f"of {data}": opt.show_states()["state"][0]["master"]}, group)
        with pytest.raises(TypeError) as raised:
            zofftk.save_sharded({"step": len if data else 3}, tmp_path / str(first), group)
        assert getattr(raised.value, "__notes__", [f"(on rank {other})"]) == [f"(on rank {other})"]
        opt.close()

    run_ranks(4, work)
