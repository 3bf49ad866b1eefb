"""What ranks want to save is one checkpoint, or is refused on all of them before anything is written."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from tests.rank_processes import run_ranks
from tests.sharding import sharded, whole
from zofftk.errors import InputError
from zofftk.sharding.agreement import content_sum
from zofftk.sharding.full import gather_full
from zofftk.sharding.saving import load_sharded, save_sharded


def test_states_of_several_groups_are_not_mixed(tmp_path):
    def run(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = pairs[rank // 2]
        torch.manual_seed(rank // 2)
        model = nn.Linear(5, 3)
        opt = zofftk.OffloadAdamW(model.parameters(), process_group=group)
        model(torch.ones(1, 5)).sum().backward()
        opt.step()
        opt.zero_grad()
        for content in ({"o": opt}, {"m": model, "o": opt}, {"o": opt.state_dict()}):
            for wait in (True, False):
                with pytest.raises(InputError, match=r"ranks 0 and 2 hold the same elements of o.*pass group="):
                    save_sharded(content, tmp_path / "all", wait=wait).wait()
        with pytest.raises(InputError, match="two ranks hold elements .* pass group="):
            gather_full(opt.state_dict())
        # Of groups of unlike sizes, no two ranks hold the same ranges.
        mine = sharded(whole((7, 3), 0), min(rank, 1), 2, 3) if rank < 2 else sharded(whole((7, 3), 1), rank - 2, 2, 8)
        with pytest.raises(InputError, match="hold .* elements of s, expected each of its 21 once: .*pass group="):
            save_sharded({"s": mine}, tmp_path / "all")
        with pytest.raises(InputError, match="m.weight has other values on rank 2 than on rank 0.*pass group="):
            save_sharded({"m": model}, tmp_path / "all")
        assert not os.listdir(tmp_path) or rank  # others may be further
        dist.barrier()
        save_sharded({"m": model, "o": opt}, tmp_path / str(rank // 2), group)
        before = model.weight.detach().clone()
        load_sharded({"m": model, "o": opt}, tmp_path / str(rank // 2), group)
        assert_same_bits(model.weight.detach(), before)
        opt.close()

    run_ranks(4, run)


def test_what_ranks_have_in_common_is_the_same(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    def run(rank):
        same = torch.arange(5000, dtype=torch.float16)
        large = torch.ones(300, 300)
        large[299, 0] += rank == 1
        copies = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (3,)), [Replicate()])
        if rank == 2:
            copies.to_local().zero_()
        save_sharded({"a": [same, 1], "step": rank}, tmp_path / "ckpt")
        for content, because in [
            ({"a": {"b": torch.tensor(float(rank == 2))}}, "a.b has other values on rank 2 than on rank 0"),
            ({"a": same, "large": large}, "large has other values on rank 1 than on rank 0"),
            ({"a": copies}, "a has other values on rank 2 than on rank 0"),
            ({"a": {"x": 1} if rank == 1 else {}}, "rank 1 has a.x to save, and rank 0 has not"),
            ({"a": {"x": same} if rank != 2 else {"y": same}}, "rank 0 has a.x to save, and rank 2 has not"),
            ({"a": same if rank == 1 else 1}, r"a is no tensor on rank 0, a tensor of shape \(5000,\) .* on rank 1"),
            ({"a": same[: 9 + rank]}, r"a is a tensor of shape \(9,\) .* on rank 0, .* \(10,\) .* on rank 1"),
            ({"a": same if rank else sharded(same, 0, 1, 1)}, "a is a state spread over ranks .* on rank 0, a tensor"),
        ]:
            with pytest.raises(InputError, match=because):
                save_sharded(content, tmp_path / "ckpt")
        state = {"a": [torch.zeros(5000, dtype=torch.float16), 0], "step": -1}
        load_sharded(state, tmp_path / "ckpt")
        assert_same_bits(state["a"][0], same)
        assert state["step"] == 0

    run_ranks(3, run)
    assert os.listdir(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
def test_sums_tell_tensors_apart(dtype):
    value = (torch.arange(7001) % 251).to(dtype)
    shifted = torch.cat([torch.zeros(1, dtype=dtype), value])[1:]  # where it lies does not count
    assert content_sum(value) == content_sum(shifted) == content_sum(value.clone())
    strided = value[1:].view(70, 100).t()
    assert content_sum(strided) == content_sum(strided.contiguous())
    for place in (0, 3500, 7000):
        other = value.clone()
        other[place] = 0 if value[place] else 1
        assert content_sum(other) != content_sum(value)
    moved = torch.cat([torch.zeros(4096), torch.ones(4096)])
    assert content_sum(moved) != content_sum(moved.flip(0))
    assert content_sum(torch.empty(0)) == content_sum(torch.empty(0, 3))
