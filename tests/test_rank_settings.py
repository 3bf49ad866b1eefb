"""Ranks that are set up unlike each other: each would update its part of the parameters in its own way."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zofftk
from tests.rank_processes import run_ranks
from tests.test_rank_states import exact_step, params
from tests.test_ranks import HYPER, alone
from zofftk.errors import RankError

UNLIKE = [
    ({"wire_dtype": torch.bfloat16}, {"wire_dtype": torch.float16}),
    ({"bucket_bytes": 4096}, {"bucket_bytes": 8192}),
    ({"reduce_dtype": torch.float32}, {}),
    ({"update": "delayed"}, {}),
    ({"update": "delayed", "delay_after": 1}, {"update": "delayed", "delay_after": 2}),
    ({"max_grad_norm": 1.0}, {"max_grad_norm": 0.5}),
    ({"loss_scale": zofftk.LossScale()}, {"loss_scale": 8.0}),
]


def test_options_are_compared_when_the_optimizer_is_built():
    def work(rank):
        for options in UNLIKE:
            name = next(name for name in (*options[0], *options[1]) if options[0].get(name) != options[1].get(name))
            with pytest.raises(RankError, match=f"ranks 0 and 1 were given other options: {name}=.* and {name}="):
                zofftk.OffloadAdamW(params(), **HYPER, **options[rank])
        kinds = (zofftk.OffloadAdamW, zofftk.OffloadLion)
        with pytest.raises(RankError, match="other options: OffloadAdamW and OffloadLion"):
            kinds[rank](params(), lr=1e-3)
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("zofftk")]
        zofftk.OffloadAdamW(params(), staging_slots=2 + rank, threads=1 + rank).close()  # each rank's own affair

    run_ranks(2, work)


@pytest.mark.parametrize("clips", [False, True], ids=["", "clip_grad_norm_"])
def test_hyper_parameters_are_compared_at_each_step(clips):
    def work(rank):
        for name, value in (("lr", 0.5), ("betas", (0.5, 0.5)), ("weight_decay", 0.5)):
            own = params()
            opt = zofftk.OffloadAdamW(own, **HYPER)
            exact_step(own, opt, 0)
            opt.param_groups[0]["lr"] = 0.25
            for p in own:
                p.grad = torch.ones_like(p)
            if rank:
                opt.param_groups[0][name] = value
            if clips:
                nn.utils.clip_grad_norm_(own, 1.0)
            before = [p.detach().clone() for p in own]
            with pytest.raises(RankError, match="ranks 0 and 1 update with other settings: "):
                opt.step()
            assert all(torch.equal(p, q) for p, q in zip(own, before, strict=True))
            opt.close()

    run_ranks(2, work)


def test_what_one_rank_does_alone_to_a_delayed_update_is_named():
    def work(rank):
        for act, says in (("flush", "flushes what is late"), ("switch_update", "switches its update")):
            own = params()
            opt = zofftk.OffloadAdamW(own, update="delayed", delay_after=0, **HYPER)
            exact_step(own, opt, 0)
            acts = {"flush": opt.flush, "switch_update": lambda opt=opt: opt.switch_update("synchronous")}
            does = partial(exact_step, own, opt, 1) if rank else acts[act]
            with pytest.raises(RankError, match=f"rank 0 {says} where rank 1 makes a step"):
                does()
            opt.close()

    run_ranks(2, work)


def test_process_groups_that_are_none_of_this_ranks():
    def work(rank):
        other = [dist.new_group([0]), dist.new_group([1])][1 - rank]
        with pytest.raises(ValueError, match=rf"process_group is one without this rank, {rank}"):
            zofftk.OffloadAdamW(params(), process_group=other)
        with pytest.raises(
            ValueError, match="process_group must be a group of torch.distributed, or None, got 'world'"
        ):
            zofftk.OffloadAdamW(params(), process_group="world")
        zofftk.OffloadAdamW(params(), process_group=alone(rank)).close()
        # Built before torch.distributed is there, as in scripts that initialise it late.
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        dist.destroy_process_group()
        own = params()
        opt = zofftk.OffloadAdamW(own, **HYPER)
        exact_step(own, opt, 0)
        dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
        with pytest.raises(RankError, match="torch.distributed has 2 ranks now, and had not been initialised"):
            exact_step(own, opt, 1)
        opt.close()

    run_ranks(2, work)
