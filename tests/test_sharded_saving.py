"""`save_sharded` and `load_sharded`: on any numbers of ranks, whole or not at all, checked before anything changes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import zofftk
from tests.compare import assert_same_bits
from tests.rank_processes import run_ranks
from tests.sharding import SHAPES, shard_states, sharded, update, whole, whole_states
from zofftk.errors import InputError
from zofftk.sharding import files, manifest, saving
from zofftk.sharding.full import gather_full
from zofftk.sharding.saving import load_sharded, save_sharded
from zofftk.sharding.state import ShardedState


@pytest.fixture(autouse=True)
def _no_save_left():
    yield
    for thread in threading.enumerate():
        if thread.name == "zofftk-save":
            thread.join(30)


def content(states, **others):
    return {
        "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [*states]}]}
    } | others


def assert_states(states, expected):
    for number, state in expected.items():
        for name, value in state.items():
            assert_same_bits(states[number][name], value, f"{number}.{name}")


def after(steps):
    states = whole_states()
    for step in steps:
        update(states, step)
    return states


def blank():
    """States in which nothing is right yet."""
    return {n: {name: torch.full_like(v, 9) for name, v in s.items()} for n, s in whole_states().items()}


def test_b09_saved_on_two_ranks_and_resumed_on_one_three_and_four(tmp_path):
    def first_run(rank):
        states = shard_states(whole_states(), rank, 2)
        for step in (1, 2, 3):
            update(states, step)
        save_sharded(content(states, epoch=3, weight=torch.ones(5)), tmp_path / "ckpt")
        update(states, 4)
        return gather_full(states, dst=None)

    def resumed(size):
        def run(rank):
            states = shard_states(blank(), rank, size)
            state = content(states, epoch=0, weight=torch.zeros(5))
            state["optimizer"]["param_groups"][0]["lr"] = 7
            load_sharded(state, tmp_path / "ckpt")
            assert state["optimizer"]["state"][0]["exp_avg"] is states[0]["exp_avg"]
            assert state["optimizer"]["param_groups"] == content(states)["optimizer"]["param_groups"]
            assert (state["epoch"], state["weight"].tolist()) == (3, [1.0] * 5)
            update(states, 4)
            full = gather_full(states, dst=size - 1)
            assert (full is not None) == (rank == size - 1)
            return full

        return run

    expected = after([1, 2, 3, 4])
    for states in run_ranks(2, first_run):
        assert_states(states, expected)
    assert_states(resumed(1)(0), expected)
    for size in (3, 4):
        assert_states(run_ranks(size, resumed(size))[-1], expected)
    plain = content(blank(), epoch=0, weight=torch.zeros(5))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(plain, checkpoint_id=tmp_path / "ckpt")  # by plain torch, into ordinary tensors
    assert_states(plain["optimizer"]["state"], after([1, 2, 3]))


def test_b09_saved_on_one_and_by_plain_torch_and_resumed_on_two(tmp_path):
    states = after([1, 2, 3])
    save_sharded(content(shard_states(states, 0, 1)), tmp_path / "one")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(content(states), checkpoint_id=tmp_path / "plain")

    def resumed(rank):
        results = []
        for name in ("one", "plain"):
            mine = shard_states(blank(), rank, 2)
            load_sharded(content(mine), tmp_path / name)
            update(mine, 4)
            results.append(gather_full(mine))
        return results

    for result in run_ranks(2, resumed)[0]:
        assert_states(result, after([1, 2, 3, 4]))


def test_groups_of_some_ranks_and_tensors_that_are_sharded_otherwise(tmp_path):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    def run(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group, mine = pairs[rank // 2], rank % 2
        full = whole((5, 3), rank // 2)
        folder = tmp_path / f"pair {rank // 2}"
        save_sharded({"value": sharded(full, mine, 2, 4)}, folder, group)
        value = sharded(torch.zeros(5, 3), mine, 2, 6)
        load_sharded({"value": value}, folder, group)
        assert_same_bits(value.full(group), full)
        assert (value.full(group, dst=1) is None) == (mine == 0)
        mesh = init_device_mesh("cpu", (4,))
        other = distribute_tensor(whole((6, 2), 8), mesh, [Shard(0)])
        handle = save_sharded(
            {"other": other, "value": sharded(full * 0 + 3, rank, 4, 1)}, tmp_path / "all", wait=False
        )
        handle.wait()
        into = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
        load_sharded({"other": into}, tmp_path / "all")
        assert isinstance(into, DTensor)
        assert_same_bits(into.full_tensor(), whole((6, 2), 8))
        with pytest.raises(ValueError, match="this rank is not in the group"):
            save_sharded({}, tmp_path / "not mine", pairs[1 - rank // 2])

    run_ranks(4, run)


# -- whole or not at all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_that_is_killed_during_a_save_leaves_the_previous_checkpoint(tmp_path, wait):
    folder = tmp_path / "ckpt"
    value = whole((50, 40), 0)

    def run(rank):
        state = {"value": sharded(value, rank, 2, 12)}
        assert all(part.numel_here for part in state.values())
        save_sharded(state, folder)
        if rank == 1:
            write, written = files._Summed.write, []

            def dying(stream, data):
                written.append(write(stream, data))
                if sum(written) > 2000:
                    os.kill(os.getpid(), signal.SIGKILL)
                return written[-1]

            files._Summed.write = dying
        start = time.monotonic()
        state["value"].zero_()
        with pytest.raises(RuntimeError, match="rank 1 has died or cannot be reached"):
            save_sharded(state, folder, wait=wait).wait()
        return time.monotonic() - start

    seconds, _ = run_ranks(2, run, killed=(1,))
    assert seconds < 15
    assert os.listdir(tmp_path) == ["ckpt"]
    into = torch.zeros(50, 40)
    load_sharded({"value": into}, folder)
    assert_same_bits(into, value)


def test_an_error_on_one_rank_is_raised_on_all_and_the_previous_checkpoint_stays(tmp_path):
    folder = tmp_path / "ckpt"
    value = whole((6, 5), 0)

    def run(rank):
        state = {"a": {"b": sharded(value, rank, 3, 7)}}
        save_sharded(state, folder)
        lost = ShardedState((6, 5), torch.float32, state["a"]["b"].parts[1:])
        none = ShardedState((6, 5), torch.float32)
        held = sharded(value, 0, 1, 0) if rank == 1 else state["a"]["b"]
        shape = ShardedState((2 + rank,), torch.float32, [(rank, torch.ones(1))])
        for wrong, error, because in [
            ({"a": {"b": lost}}, InputError, r"the ranks hold \d+ elements of a.b, expected each of its 30 once"),
            ({"a": {"b": none}}, InputError, "the ranks hold 0 elements of a.b, expected each of its 30 once"),
            ({"a": {"b": held}}, InputError, r"the same elements of a.b, expected each of its 30 once: .*pass group="),
            ({"a": {"b": shape}}, InputError, r"a.b is a state .* \(2,\) .* on rank 0, .* \(3,\) .* on rank 1"),
            ({"a": [1, test_kinds_of_values] if rank == 2 else 1}, TypeError, r"cannot save state\['a'\]\[1\]"),
        ]:
            with pytest.raises(error, match=because):
                save_sharded(wrong, folder)
            with pytest.raises(error, match=because):
                save_sharded(wrong, folder, wait=False).wait()
        if rank == 1:

            def full_disk(self, data):
                raise OSError(28, "No space left on device")

            files._Summed.write = full_disk
        with pytest.raises(OSError, match="No space left on device"):
            save_sharded(state, folder)
        handle = save_sharded(state, folder, wait=False)
        if rank == 0:  # who has not looked is told by the next one, and all are
            with pytest.raises(OSError, match="No space"):
                handle.wait()
        with pytest.raises(RuntimeError, match="that was not waited for has failed: .*No space left"):
            save_sharded(state, folder)
        assert os.listdir(tmp_path) == ["ckpt"]
        into = sharded(torch.zeros(6, 5), rank, 3, 5)
        load_sharded({"a": {"b": into}}, folder)
        assert_same_bits(into.full(), value)

    run_ranks(3, run)


def test_a_save_that_is_not_waited_for_has_the_values_of_its_call(tmp_path):
    def run(rank):
        states = shard_states(whole_states(), rank, 2)
        write = manifest.write
        manifest.write = lambda *args: time.sleep(0.2) or write(*args)
        counts = []
        for step in (1, 2):
            update(states, step)
            handle = save_sharded(content(states, steps=[step]), tmp_path / "ckpt", wait=False)
            count, under_way = 0, torch.ones(1)
            while under_way:
                count += 1
                for state in states.values():  # training goes on, and ranks talk
                    state["master"].copy_(state["master"])
                    state["exp_avg"].zero_()
                under_way = torch.tensor(0.0 if handle.done() else 1.0)
                dist.all_reduce(under_way, op=dist.ReduceOp.MAX)
            counts.append(count)
            assert handle.wait() == tmp_path / "ckpt"
            state = content(shard_states(blank(), rank, 2), steps=[])
            load_sharded(state, tmp_path / "ckpt")
            assert state["steps"] == [step]
            exp_avg = gather_full(state)
            if rank == 0 and step == 1:
                assert_states(exp_avg["optimizer"]["state"], after([1]))
        return counts

    for counts in run_ranks(2, run):
        assert min(counts) > 1


# -- one process ---------------------------------------------------------------------------------------------------


def test_kinds_of_values(tmp_path):
    state = {
        "tensors": {0: {"exp_avg": whole((3, 4), 0), "my count": 3}, "1": torch.arange(3), 2: [torch.ones(2)]},
        "plain": [1, 2.5, "text", None, True, b"bytes", (torch.bfloat16, torch.Size([2])), {3}],
        "weight": torch.nn.Parameter(torch.ones(2)),
        7: {"seven": {}},
    }
    for wait in (True, False):
        save_sharded(state, tmp_path / "ckpt", wait=wait)
        into = {
            "tensors": {
                0: {"exp_avg": torch.zeros(3, 4), "my count": 0},
                "1": torch.zeros(3, dtype=int),
                2: [torch.ones(2)],
            },
            "plain": None,
            "weight": torch.nn.Parameter(torch.zeros(2)),
        }
        weight = into["weight"]
        load_sharded(into, tmp_path / "ckpt")
        assert into["plain"] == state["plain"]
        assert list(into["tensors"]) == [0, "1", 2]
        assert into["tensors"][0]["my count"] == 3
        assert into["tensors"]["1"].tolist() == [0, 1, 2]
        assert_same_bits(into["tensors"][0]["exp_avg"], whole((3, 4), 0))
        assert into["weight"] is weight
        assert weight.tolist() == [1.0, 1.0]


def test_objects_with_a_state_dict(tmp_path):
    model = torch.nn.Linear(3, 2)
    opt = zofftk.OffloadAdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    opt.zero_grad()
    save_sharded({"model": model, "optimizer": opt}, tmp_path / "ckpt")
    twin = torch.nn.Linear(3, 2)
    again = zofftk.OffloadAdamW(twin.parameters())
    twin(torch.ones(1, 3)).sum().backward()
    again.step()
    load_sharded({"model": twin, "optimizer": again}, tmp_path / "ckpt")
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(q.detach(), p.detach())
        assert_same_bits(again.state[q]["master"], opt.state[p]["master"])
    opt.close()
    again.close()


MISFITS = {
    "missing": ({"a": {"b": torch.zeros(3), "c": torch.zeros(1)}}, r"the checkpoint .*/ckpt has no a.c"),
    "shape": ({"a": {"b": torch.zeros(4)}}, r"a.b has shape \(3,\) in the checkpoint .*/ckpt, expected \(4,\)"),
    "no tensor": ({"a": {"b": 3, "n": 0}}, "a.b is a tensor in the checkpoint .*, and no tensor where it is to go"),
    "a tensor": ({"a": {"b": torch.zeros(3), "n": torch.zeros(1)}}, "a.n is no tensor in the checkpoint"),
    "meta": ({"a": {"b": torch.zeros(3, device="meta"), "n": 0}}, "a.b is to go into a tensor on the meta device"),
    "not all": ({"a": {"b": torch.zeros(3)}}, "nothing asks for a.n in the checkpoint .*, or strict=False"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_named_before_anything_changes(tmp_path, what):
    save_sharded({"a": {"b": torch.ones(3), "n": 1}, "other": 1}, tmp_path / "ckpt")
    state, because = MISFITS[what]
    with pytest.raises(InputError, match=because):
        load_sharded(state, tmp_path / "ckpt")
    assert what == "meta" or not torch.as_tensor(state["a"]["b"]).any() or state["a"]["b"] == 3
    if what == "not all":
        load_sharded(state, tmp_path / "ckpt", strict=False)
        assert state["a"]["b"].tolist() == [1, 1, 1]


def test_a_script_that_ends_has_its_last_checkpoint(tmp_path):
    child = os.fork()
    if not child:
        try:
            write = manifest.write
            manifest.write = lambda *args: time.sleep(0.2) or write(*args)
            save_sharded({"a": torch.ones(3)}, tmp_path / "ckpt", wait=False)
            threading._shutdown()  # as the interpreter does when the script is at its end
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    state = {"a": torch.zeros(3)}
    load_sharded(state, tmp_path / "ckpt")
    assert state["a"].tolist() == [1, 1, 1]


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint: expected a folder with .metadata: .*/nothing"):
        load_sharded({"a": 1}, tmp_path / "nothing")
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(FileExistsError, match="it holds 'mine.txt', which would be lost"):
        save_sharded({"a": 1}, tmp_path)
    with pytest.raises(TypeError, match="expected a dict of state dicts and plain values, got list"):
        save_sharded([1], tmp_path / "ckpt")
    assert sorted(os.listdir(tmp_path)) == ["mine.txt"]


def test_ranks_that_do_not_share_a_file_system(tmp_path):
    save_sharded({"a": 1}, tmp_path / "ckpt")

    def run(rank):
        if rank == 1:  # its file goes elsewhere
            writer = saving.summing_writer
            saving.summing_writer = lambda folder: writer(tmp_path / "elsewhere")
        because = r"the first rank does not see it: expected a file system that all ranks share: .*__1_0.distcp"
        with pytest.raises(FileNotFoundError, match=because):
            save_sharded({"a": 2, "b": ShardedState((2,), torch.float32, [(rank, torch.ones(1))])}, tmp_path / "ckpt")

    run_ranks(2, run)
    state = {"a": 0}
    load_sharded(state, tmp_path / "ckpt")
    assert state == {"a": 1}


def test_values_that_need_code_are_not_loaded(tmp_path):
    value = torch.zeros(3)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"a": torch.ones(3), "b": Path("/x").exists}, checkpoint_id=tmp_path / "ckpt")
    with pytest.raises(InputError, match="b in the checkpoint is no plain value, or damaged"):
        load_sharded({"a": value, "b": 1}, tmp_path / "ckpt")
    assert not value.any()


def test_each_chunk_is_read_once(tmp_path, monkeypatch):
    """Of a checkpoint of plain tensors, a part in many boxes wants the one chunk many times."""
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"value": whole((40, 9), 0)}, checkpoint_id=tmp_path / "ckpt")
    loads, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loads.append(1) or load(*args, **kwargs))
    into = sharded(torch.zeros(40, 9), 0, 1, 7)
    assert len(into.parts) > 3
    load_sharded({"value": into}, tmp_path / "ckpt")
    assert len(loads) == 1
    assert_same_bits(into.full(), whole((40, 9), 0))


def test_shapes_of_the_case_are_all_here():
    assert {(7,), (3, 5), (1,), (), (0,), (2, 3, 4)} <= set(SHAPES)
