"""`ShardedState`: boxes that tile its ranges, torch's distributed checkpoints both ways, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from math import prod

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zofftk
from tests.compare import assert_same_bits
from tests.sharding import SHAPES, sharded, whole
from zofftk.errors import InputError
from zofftk.sharding.boxes import boxes
from zofftk.sharding.saving import load_sharded, save_sharded
from zofftk.sharding.state import ShardedState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def shapes():
    return st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(shapes(), st.data())
def test_boxes_tile_a_range_in_order(shape, data):
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    found = boxes(shape, start, stop)
    assert len(found) <= 2 * max(1, len(shape)) - 1
    at = start
    for box in found:
        assert len(box.offsets) == len(box.sizes) == len(shape)
        assert numbers[box.slices].shape == box.sizes
        assert numbers[box.slices].reshape(-1).tolist() == list(range(at, box.stop))
        assert box.start == at
        at = box.stop
    assert at == stop


def torchs_save(state, folder):
    dcp.save(state, checkpoint_id=folder)


def torchs_load(state, folder):
    dcp.load(state, checkpoint_id=folder)


@settings(max_examples=40, deadline=None)
@given(
    shapes(),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([torchs_save, save_sharded]),
)
def test_a_checkpoint_goes_from_any_ranges_to_any_others(shape, seed, dtype, save):
    full = whole(shape, seed).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        save({"value": sharded(full, 0, 1, seed)}, folder)
        for load in (torchs_load, load_sharded):
            for into in (sharded(torch.zeros_like(full), 0, 1, seed + 1), torch.zeros_like(full)):
                state = {"value": into}
                load(state, folder)
                assert state["value"] is into
                assert_same_bits(into.full() if isinstance(into, ShardedState) else into, full)


def test_b09_a_checkpoint_of_plain_tensors_loads_into_parts(tmp_path):
    full = {str(number): whole(shape, number) for number, shape in enumerate(SHAPES)}
    dcp.save({"states": full}, checkpoint_id=tmp_path)
    parts = {name: sharded(torch.full_like(value, 7), 0, 1, 3) for name, value in full.items()}
    places = {name: [part.values.data_ptr() for part in value.parts] for name, value in parts.items()}
    dcp.load({"states": parts}, checkpoint_id=tmp_path)
    for name, value in parts.items():
        assert_same_bits(value.full(), full[name])
        assert [part.values.data_ptr() for part in value.parts] == places[name]


def test_a_box_is_this_ranks_memory_and_no_more():
    """Torch copies a tensor whose storage is larger, and keeps the last copy of each key until the file is written."""
    state = sharded(whole((6, 5), 0), 0, 1, 1)
    for item in state.__create_write_items__("value", state):
        box = state.__get_tensor_shard__(item.index)
        assert box.untyped_storage().nbytes() == box.numel() * 4
        assert box.is_contiguous()
        box.fill_(3)
    assert all((part.values == 3).all() for part in state.parts)
    assert isinstance(state, _Checkpointable)


@pytest.mark.parametrize("flatten", [False, True])
def test_torchs_optimizer_state_dicts_with_parts_in_them(tmp_path, flatten):
    """As the state of an optimizer that has them in place of tensors, through the helpers and a plain AdamW."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def pair(fill):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
        opt = torch.optim.AdamW(model.parameters(), lr=fill)
        for p in model.parameters():
            p.grad = torch.full_like(p, fill)
        opt.step()
        return model, opt

    def in_parts(opt):
        for number, state in enumerate(opt.state.values()):
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = sharded(state[name], 0, 1, number)

    plain, torchs = pair(0.5)
    model, opt = pair(0.25)
    in_parts(opt)
    dcp.save({"o": get_optimizer_state_dict(plain, torchs, options=options)}, checkpoint_id=tmp_path / "plain")
    content = {"o": get_optimizer_state_dict(model, opt, options=options)}
    dcp.load(content, checkpoint_id=tmp_path / "plain")
    set_optimizer_state_dict(model, opt, content["o"], options=options)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(opt.state[p]["exp_avg"]) is ShardedState
        assert_same_bits(opt.state[p]["exp_avg"].full(), torchs.state[q]["exp_avg"])
    assert opt.param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match=r"full\(group\) gathers it"):
        opt.step()

    model, opt = pair(0.125)
    in_parts(opt)
    dcp.save({"o": get_optimizer_state_dict(model, opt, options=options)}, checkpoint_id=tmp_path / "parts")
    content = {"o": get_optimizer_state_dict(plain, torchs, options=options)}
    dcp.load(content, checkpoint_id=tmp_path / "parts")
    set_optimizer_state_dict(plain, torchs, content["o"], options=options)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits(torchs.state[q]["exp_avg_sq"], opt.state[p]["exp_avg_sq"].full())


@pytest.mark.parametrize("how", ["default", "blocking"])
def test_torchs_asynchronous_save_copies_the_parts(tmp_path, how):
    full = whole((4, 5), 0)
    state = sharded(full, 0, 1, 1)
    writer = {"storage_writer": dcp.FileSystemWriter(tmp_path)} if how == "blocking" else {"checkpoint_id": tmp_path}
    future = dcp.async_save({"value": state}, **writer)
    state.zero_()
    future.result()
    into = torch.zeros(4, 5)
    dcp.load({"value": into}, checkpoint_id=tmp_path)
    assert_same_bits(into, full)


# -- as a tensor ---------------------------------------------------------------------------------------------------


def test_copies_and_conversions_of_parts():
    full = whole((3, 5), 0)
    state = ShardedState((3, 5), torch.float32, [(9, full.view(-1)[9:12]), (2, full.view(-1)[2:7])])
    assert [(part.start, part.stop) for part in state.parts] == [(2, 7), (9, 12)]
    assert repr(state) == f"{state}" == "ShardedState(shape=(3, 5), dtype=torch.float32, 8 of 15 elements on this rank)"
    assert (state.shape, state.dtype, state.device.type, len(state)) == ((3, 5), torch.float32, "cpu", 3)
    assert (state.numel(), state.numel_here) == (15, 8)
    assert not state.is_pinned()
    for same in (state.detach(), copy.copy(state), state.data, state.cpu(), state.float()):
        assert same.parts[0].values.data_ptr() == state.parts[0].values.data_ptr()
    both = copy.deepcopy([state, state])
    assert both[0] is both[1]
    for other in (both[0], state.clone(), state.to("cpu", copy=True)):
        assert other.parts[0].values.data_ptr() != state.parts[0].values.data_ptr()
        assert [part.values.tolist() for part in other.parts] == [part.values.tolist() for part in state.parts]
    half = state.bfloat16()
    assert (half.dtype, half.parts[1].values.dtype) == (torch.bfloat16, torch.bfloat16)
    zeros = torch.zeros_like(state)
    assert [part.values.tolist() for part in zeros.parts] == [[0.0] * 5, [0.0] * 3]
    zeros.copy_(state)
    assert_same_bits(zeros.parts[1].values, state.parts[1].values)
    state.zero_()
    assert (full.view(-1)[9:12] == 0).all()


def test_whole_tensors_are_read_from():
    full = whole((4, 3), 0)
    for source in (full, full.t().contiguous().t(), full.double()):
        state = ShardedState((4, 3), torch.float32, [(1, torch.zeros(2)), (4, torch.zeros(7))])
        state.copy_(source)
        assert_same_bits(state.parts[0].values, full.view(-1)[1:3])
        assert_same_bits(state.parts[1].values, full.view(-1)[4:11])
    with pytest.raises(ValueError, match=r"expected a tensor of shape \(4, 3\), got \(3, 4\)"):
        state.copy_(full.t())


REFUSED = {
    "add": lambda s: s + 1,
    "radd": lambda s: torch.ones(3, 5) + s,
    "mul_": lambda s: s.mul_(2),
    "equal": lambda s: s == s,
    "norm": lambda s: torch.linalg.vector_norm(s),
    "index": lambda s: s[0],
    "iterate": lambda s: list(s),
    "assign": lambda s: s.__setitem__(0, 1.0),
    "view": lambda s: s.view(-1),
    "foreach": lambda s: torch._foreach_add_([s], 1.0),
    "numpy": lambda s: s.numpy(),
    "tolist": lambda s: s.tolist(),
    "storage": lambda s: s.untyped_storage(),
    "share": lambda s: s.share_memory_(),
    "apply": lambda s: s.apply_(abs),
    "dlpack": lambda s: torch.from_dlpack(s),
    "meta": lambda s: s.to("meta"),
    "into a plain tensor": lambda s: torch.ones(3, 5).copy_(s),
    "another size": lambda s: s.new_empty(3),
    "data": lambda s: setattr(s, "data", torch.ones(3, 5)),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_needs_all_values_is_refused(how):
    state = ShardedState((3, 5), torch.float32, [(2, torch.ones(4))])
    with pytest.raises(RuntimeError, match=r"4 of 15 elements on this rank\). full\(group\) gathers it"):
        REFUSED[how](state)
    assert (state.parts[0].values == 1).all()


@pytest.mark.parametrize("read", [float, bool, lambda s: s.item()])
def test_a_scalar_that_another_rank_holds_is_refused(read):
    with pytest.raises(RuntimeError, match=r"0 of 1 elements on this rank\). full\(group\) gathers it"):
        read(ShardedState((), torch.float32))


@pytest.mark.parametrize(
    "save",
    [
        pickle.dumps,
        lambda value: torch.save(value, io.BytesIO()),
        lambda value: torch.save({"state": [value]}, io.BytesIO()),
        lambda value: zofftk.save("unused", {"state": {0: {"exp_avg": value}}}),
    ],
)
def test_one_file_is_refused_with_what_to_call(save):
    with pytest.raises(TypeError, match=r"zofftk.save_sharded"):
        save(ShardedState((3, 5), torch.float32))


@pytest.mark.parametrize(
    ("parts", "because"),
    [
        ([(0, torch.ones(2, 2))], "expected parts of one dimension, torch.float32 and contiguous on the CPU"),
        ([(0, torch.ones(2).double())], "got torch.float64 of shape"),
        ([(0, torch.ones(4)[::2])], r"and stride \(2,\)"),
        ([(0, torch.ones(2, device="meta"))], "on meta"),
        ([(14, torch.ones(2))], r"elements \[14, 16\) are not in a tensor of shape \(3, 5\)"),
        ([(-1, torch.ones(2))], r"elements \[-1, 1\)"),
        ([(4, torch.ones(3)), (2, torch.ones(3))], r"elements \[4, 5\) are in two parts"),
    ],
)
def test_parts_that_do_not_fit(parts, because):
    with pytest.raises(ValueError, match=because):
        ShardedState((3, 5), torch.float32, parts)


def test_parts_without_elements_are_left_out():
    state = ShardedState((3, 5), torch.float32, [(2, torch.ones(1)), (2, torch.ones(0))])
    assert [part.start for part in state.parts] == [2]


def test_parts_of_a_slice_count_its_own_elements():
    full = torch.arange(24.0).view(4, 6)
    slice_of_it = full[1:3, 2:6].reshape(-1)
    state = ShardedState((4, 6), torch.float32, [(3, torch.zeros(5))], within=((1, 2), (2, 4)))
    for source in (full, full.t().contiguous().t()):
        state.zero_()
        state.read_from(source)
        assert torch.equal(state.parts[0].values, slice_of_it[3:8])
    assert state.clone().within == state.within
    other = ShardedState((4, 6), torch.float32, [(3, torch.zeros(5))])
    with pytest.raises(ValueError, match="hold different elements"):
        other.copy_(state)
    with pytest.raises(ValueError, match=r"expected a slice within a tensor of shape \(4, 6\), got"):
        ShardedState((4, 6), torch.float32, within=((1, 2), (4, 4)))
    with pytest.raises(ValueError, match=r"elements \[5, 10\) are not in a tensor of shape \(2, 4\)"):
        ShardedState((4, 6), torch.float32, [(5, torch.zeros(5))], within=((1, 2), (2, 4)))
    with pytest.raises(InputError, match="no rank holds 16 of the 24 elements of state"):
        state.full()
    with pytest.raises(InputError, match=r"no rank holds elements \[0, 2\) of state"):
        ShardedState((2,), torch.float32, [(0, torch.zeros(2))], is_copy=True).full()
