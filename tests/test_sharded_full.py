"""Whole states out of those of many ranks, and back: chunk by chunk, into the whole tensors' own memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zofftk
from tests.compare import assert_same_bits
from tests.rank_processes import run_ranks
from tests.sharding import shard_states, sharded, whole, whole_states
from zofftk.errors import InputError
from zofftk.sharding import full as sharded_full
from zofftk.sharding.full import gather_full, take_full
from zofftk.sharding.state import ShardedState


def test_one_file_of_three_ranks_is_read_by_two_and_by_torch(tmp_path):
    states = whole_states()

    def save(rank):
        sharded_full.CHUNK_BYTES = 20  # several messages a range
        mine = shard_states(states, rank, 3)
        full = gather_full({"state": mine, "param_groups": [{"lr": 0.1}]}, dst=1)
        assert (full is None) == (rank != 1)
        if full is not None:
            zofftk.save(tmp_path / "file.pt", full)
        everywhere = gather_full(mine, dst=None)
        for number, state in states.items():
            for name, value in state.items():
                assert type(everywhere[number][name]) is torch.Tensor
                assert_same_bits(everywhere[number][name], value)

    def load(rank):
        mine = shard_states({n: {k: v * 0 - 1 for k, v in s.items()} for n, s in states.items()}, rank, 2)
        take_full({"state": mine}, zofftk.load(tmp_path / "file.pt"))
        for number, state in states.items():
            assert_same_bits(mine[number]["master"].full(), state["master"])

    run_ranks(3, save)
    run_ranks(2, load)
    saved = torch.load(tmp_path / "file.pt", weights_only=True)
    params = [torch.nn.Parameter(torch.zeros_like(state["master"])) for state in states.values()]
    opt = torch.optim.AdamW(params)
    opt.load_state_dict({**opt.state_dict(), "state": saved["state"]})
    for number, p in enumerate(params):
        assert_same_bits(opt.state[p]["exp_avg"], states[number]["exp_avg"])


def test_only_the_receiver_allocates():
    def run(rank):
        state = sharded(whole((300, 70), 0), rank, 3, 8)
        sizes, empty = [], torch.empty
        torch.empty = lambda *args, **kwargs: sizes.append(args[0]) or empty(*args, **kwargs)
        state.full(dst=2)
        torch.empty = empty
        return (300, 70) in [tuple(size) if isinstance(size, torch.Size) else size for size in sizes]

    assert run_ranks(3, run) == [False, False, True]


def test_a_group_of_some_ranks():
    def run(rank):
        group = dist.new_group([1, 2])
        if rank:
            value = whole((4, 3), 0)
            assert_same_bits(sharded(value, rank - 1, 2, 1).full(group), value)
            assert (sharded(value, rank - 1, 2, 1).full(group, dst=0) is None) == (rank == 2)

    run_ranks(3, run)


def test_gathering_what_is_not_whole_is_refused_on_all_ranks():
    def run(rank):
        value = whole((5, 4), 0)
        state = {"a": [sharded(value, rank, 2, 3)]}
        assert_same_bits(gather_full(state, dst=None)["a"][0], value)
        some = ShardedState((5, 4), torch.float32, [(3, torch.ones(2))] if rank else [(0, torch.ones(2))])
        with pytest.raises(InputError, match=r"no rank holds elements \[2, 3\) of state\['a'\]"):
            gather_full({"a": some})
        twice = ShardedState((2,), torch.float32, [(0, torch.ones(2))])
        with pytest.raises(InputError, match=r"two ranks hold elements \[0, 2\) of state\['a'\]"):
            gather_full({"a": twice})
        with pytest.raises(InputError, match="rank 0 and rank 1 hold different states"):
            gather_full({"a" if rank else "b": twice})
        with pytest.raises(InputError, match=r"no rank holds elements \[5, 20\)"):
            gather_full(
                {"a": ShardedState((5, 4), torch.float32, [(2, torch.ones(3))] if rank else [(0, torch.ones(2))])}
            )
        half = sharded(value.bfloat16(), rank, 2, 3).full()
        assert_same_bits(half, value.bfloat16())

    run_ranks(2, run)


def test_states_are_taken_out_of_a_mapped_file(tmp_path):
    full = {0: {"exp_avg": whole((300, 7), 0), "step": torch.tensor(3.0)}, 1: {"exp_avg": whole((), 1)}}
    zofftk.save(tmp_path / "file.pt", {"state": full})
    state = {0: {"exp_avg": sharded(torch.zeros(300, 7), 0, 1, 5)}, 1: {"exp_avg": sharded(torch.zeros(()), 0, 1, 5)}}
    take_full({"state": state}, zofftk.load(tmp_path / "file.pt"))
    for number, entry in state.items():
        assert_same_bits(entry["exp_avg"].full(), full[number]["exp_avg"])
    before = state[0]["exp_avg"].full()
    for wrong in ({}, {0: {"exp_avg": torch.zeros(300, 7)}, 1: {}}, {0: {"exp_avg": torch.zeros(300, 7)}, 1: []}):
        with pytest.raises(ValueError, match=r"state\['state'\]\[\d\](\['exp_avg'\])?: expected an entry for it"):
            take_full({"state": state}, {"state": wrong})
    with pytest.raises(ValueError, match=r"expected a whole tensor of shape \(\), got \(1,\)"):
        take_full({"state": state}, {"state": {0: full[0], 1: {"exp_avg": torch.zeros(1)}}})
    assert_same_bits(state[0]["exp_avg"].full(), before)
