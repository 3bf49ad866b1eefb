"""State dicts: torch.optim.AdamW's format, both ways, through files, tools and torch's distributed checkpoints."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zofftk
from tests.compare import assert_same_bits
from tests.small_gpt import build, loss_of

STATES = ("exp_avg", "exp_avg_sq", "master")
pytestmark = pytest.mark.usefixtures("no_threads_left")
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
SMALL = {"vocab": 50, "hidden": 16, "layers": 1, "heads": 2}


def pair(dtype, cls=zofftk.OffloadAdamW, **options):
    model = build(dtype, **SMALL)
    return model, cls(model.parameters(), **{"lr": 1e-2, **options})


def train(model, opt, steps):
    for step in steps:
        loss_of(model, step, SMALL["vocab"]).backward()
        opt.step()
        opt.zero_grad()


@pytest.fixture
def close():
    """Closes optimizers at the end."""
    opened = []
    yield lambda opt: opened.append(opt) or opt
    for opt in opened:
        opt.close()


def trained(close, dtype, steps=3, **options):
    model, opt = pair(dtype, **options)
    close(opt)
    train(model, opt, range(steps))
    return model, opt


def assert_same_states(opt, other, names=("step", "exp_avg", "exp_avg_sq")):
    mine, theirs = opt.state_dict()["state"], other.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for number in mine:
        for name in names:
            assert_same_bits(torch.as_tensor(mine[number][name]), torch.as_tensor(theirs[number][name]), name)


# -- the format ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_and_states_have_torchs_entries_in_torchs_order(close, dtype):
    _, opt = trained(close, dtype)
    model, torchs = pair(dtype, torch.optim.AdamW)
    train(model, torchs, range(1))
    mine, theirs = opt.state_dict(), torchs.state_dict()
    assert list(mine) == list(theirs)
    assert mine["param_groups"] == theirs["param_groups"]
    assert [list(group) for group in mine["param_groups"]] == [list(group) for group in theirs["param_groups"]]
    for number, state in theirs["state"].items():
        assert list(mine["state"][number]) == [*state, "master"]
        assert mine["state"][number]["step"].dtype == state["step"].dtype


@pytest.mark.parametrize("key", ["amsgrad", "maximize", "differentiable"])
def test_what_would_give_other_results_is_refused(close, key):
    model, opt = trained(close, torch.float32)
    saved = opt.state_dict()
    saved["param_groups"][0][key] = True
    with pytest.raises(ValueError, match=f"{key} is an option of torch's that is not offered here"):
        opt.load_state_dict(saved)
    with pytest.raises(ValueError, match=f"{key} is an option of torch's that is not offered here"):
        zofftk.OffloadAdamW([{"params": list(model.parameters()), key: True}])


def test_each_tensor_is_saved_with_its_own_values_alone(close):
    _, opt = trained(close, torch.bfloat16)
    for state in opt.state_dict()["state"].values():
        for value in state.values():
            assert value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
            assert (value.device.type, value.is_pinned(), type(value)) == ("cpu", False, torch.Tensor)


# -- to torch and back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"capturable": True}])
def test_fp32_states_go_both_ways_bit_for_bit(close, options):
    model, torchs = pair(torch.float32, torch.optim.AdamW, **({} if "capturable" in options else options))
    train(model, torchs, range(3))
    saved = copy.deepcopy(torchs.state_dict())
    saved["param_groups"][0].update(options)
    twin, opt = pair(torch.float32, lr=7.0, betas=(0.1, 0.2))
    close(opt).load_state_dict(saved)
    twin.load_state_dict(model.state_dict())
    assert_same_states(opt, torchs)
    assert opt.state_dict()["param_groups"] == saved["param_groups"]
    third, again = pair(torch.float32, torch.optim.AdamW, lr=9.0)
    third.load_state_dict(twin.state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert_same_states(again, torchs)
    if "capturable" not in options:  # which needs a GPU to go on
        train(model, torchs, [3])
        train(twin, opt, [3])
        train(third, again, [3])
        for p, q, r in zip(model.parameters(), twin.parameters(), third.parameters(), strict=True):
            assert_same_bits(r.detach(), p.detach())
            torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_torch_rounds_the_moments_of_16_bit_parameters(close, dtype):
    model, opt = trained(close, dtype)
    twin, torchs = pair(dtype, torch.optim.AdamW)
    torchs.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torchs.state[q]["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(torchs.state[q][name], opt.state[p][name].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # in fp16, torch's second moments become 0 here
@pytest.mark.parametrize("steps", [0, 1])
def test_masters_that_torch_has_gone_past_do_not_come_back(close, dtype, steps, caplog):
    """Torch keeps entries that it does not know, as they were."""
    model, opt = trained(close, dtype)
    twin, torchs = pair(dtype, torch.optim.AdamW)
    twin.load_state_dict(model.state_dict())
    torchs.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(twin, torchs, range(3, 3 + steps))
    third, again = pair(dtype)
    third.load_state_dict(twin.state_dict())
    close(again).load_state_dict(torchs.state_dict())
    before = [p.detach().clone() for p in third.parameters()]
    train(third, again, [4])
    assert all((p - old).abs().max() < 0.05 for p, old in zip(third.parameters(), before, strict=True))


def test_a_tool_that_casts_nothing_and_goes_on(close):
    """A master that does not round to the weight is none."""
    model, opt = trained(close, torch.bfloat16)
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        state["step"] += 1
        state["master"].fill_(100.0)
    twin, again = pair(torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    close(again).load_state_dict(saved)
    train(twin, again, [4])
    assert all(again.state[q]["master"].abs().max() < 100 for q in twin.parameters())
    assert {again.state[q]["step"].item() for q in twin.parameters()} == {5}


def test_masters_of_todays_and_yesterdays_files_are_taken(close):
    model, opt = trained(close, torch.bfloat16)
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:  # the entries it had then
        for key in [key for key in group if key not in ("lr", "betas", "eps", "weight_decay", "params")]:
            del group[key]
    twin, again = pair(torch.bfloat16)
    close(again).load_state_dict(saved)
    assert_same_states(again, opt, [*STATES, "step"])
    assert again.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
    del model, twin


def test_cpu_adamw_and_back(close):
    model, opt = trained(close, torch.bfloat16)
    twin, cpu = pair(torch.bfloat16, zofftk.CPUAdamW)
    twin.load_state_dict(model.state_dict())
    cpu.load_state_dict(opt.state_dict())
    train(model, opt, [3])
    train(twin, cpu, [3])
    third, again = pair(torch.bfloat16)
    close(again).load_state_dict(cpu.state_dict())
    assert_same_states(again, opt, [*STATES, "step"])
    del third


# -- what others put in, and do ------------------------------------------------------------------------------------


def test_b51_save_load_save_gives_the_same_file(close, tmp_path):
    model, opt = trained(close, torch.bfloat16)
    first = next(iter(model.parameters()))
    opt.state[first].update({"my count": 3, "my nothing": None, "my tensor": torch.arange(3)})
    opt.param_groups[0]["my name"] = "all"
    contents = []
    for number in range(3):
        zofftk.save(tmp_path / "file.pt", {"optimizer": opt.state_dict()})
        contents.append((tmp_path / "file.pt").read_bytes())
        loaded = zofftk.load(tmp_path / "file.pt")["optimizer"]
        model, opt = pair(torch.bfloat16, bucket_bytes=1 << 12 << number)
        close(opt).load_state_dict(loaded)
    assert contents[1] == contents[0]
    assert contents[2] == contents[0]
    state = opt.state[next(iter(model.parameters()))]
    assert (state["my count"], state["my nothing"], state["my tensor"].tolist()) == (3, None, [0, 1, 2])
    assert opt.param_groups[0]["my name"] == "all"


def test_b51_a_step_that_is_an_int_and_entries_that_are_none(close):
    model, opt = trained(close, torch.bfloat16)
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        state.update(step=3, max_exp_avg_sq=None)
    twin, again = pair(torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    close(again).load_state_dict(saved)
    train(model, opt, [3])
    train(twin, again, [3])
    assert_same_states(again, opt, [*STATES, "step"])
    assert again.state_dict()["state"][0]["max_exp_avg_sq"] is None


def test_b51_a_tool_that_moves_every_value(close):
    model, opt = trained(close, torch.bfloat16)
    moved = {number: {k: v.cpu().clone() for k, v in s.items()} for number, s in opt.state_dict()["state"].items()}
    for p in model.parameters():
        for name, value in opt.state[p].items():
            opt.state[p][name] = value.cpu().clone()
    twin, again = pair(torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    close(again).load_state_dict({**opt.state_dict(), "state": moved})
    train(model, opt, [3])
    train(twin, again, [3])
    assert_same_states(again, opt, [*STATES, "step"])


def test_a_step_assigned_as_a_number_does_not_stop_training(close):
    model, opt = trained(close, torch.bfloat16)
    for p in model.parameters():
        opt.state[p]["step"] = 3
    train(model, opt, [3])
    assert {opt.state[p]["step"].item() for p in model.parameters()} == {4}


@pytest.mark.parametrize("step", [0, 3])
def test_b50_everything_is_on_the_host_after_loading(close, step):
    _, opt = trained(close, torch.bfloat16)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True, map_location="cpu")
    for state in saved["state"].values():
        state.update(step=torch.tensor(float(step)))
    twin, again = pair(torch.bfloat16)
    next(iter(twin.parameters())).requires_grad_(False)
    del again
    again = close(zofftk.OffloadAdamW(twin.parameters()))
    places = {p: again.state[p]["master"].data_ptr() for p in twin.parameters() if p in again.state}
    again.load_state_dict(saved)
    for p in twin.parameters():
        state = again.state[p]
        names = [*STATES, "step"]
        assert {name: state[name].device.type for name in names} == dict.fromkeys(names, "cpu")
        assert state["step"] == step
        assert [state[name].dtype for name in STATES] == [torch.float32] * 3
        assert places.get(p) in (None, state["master"].data_ptr())
    assert_same_states(again, opt, ["exp_avg", "exp_avg_sq", "master"])


B33 = """
import sys, torch, zofftk
p = torch.nn.Parameter(torch.zeros(1))
opt = zofftk.OffloadAdamW([p], lr=0.75, betas=(0.1, 0.2), weight_decay=0.3)
saved = zofftk.load(sys.argv[1])
opt.load_state_dict(saved["optimizer"])
with torch.no_grad():
    p.copy_(saved["p"])
p.grad = torch.full((1,), 6.0)
opt.step()
group = opt.param_groups[0]
print(p.item().hex(), opt.state[p]["step"].item(), group["lr"], group["betas"], group["weight_decay"])
"""


def test_b33_a_new_process_with_other_settings_goes_on(close, tmp_path):
    p = torch.nn.Parameter(torch.ones(1))
    opt = close(zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0))
    for gradient in range(1, 7):
        if gradient == 6:
            zofftk.save(tmp_path / "file.pt", {"optimizer": opt.state_dict(), "p": p})
        p.grad = torch.full((1,), float(gradient))
        opt.step()
    command = [sys.executable, "-c", textwrap.dedent(B33), tmp_path / "file.pt"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert said.split() == [p.item().hex(), "6.0", "0.1", "(0.9,", "0.999)", "0.0"]
    assert p.item() == pytest.approx(0.4172737, abs=1e-6)


# -- torch.distributed.checkpoint ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flatten", [False, True])
def test_torchs_distributed_checkpoints(close, tmp_path, dtype, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def content(model, opt):
        return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt, options=options)}

    model, opt = trained(close, dtype)
    dcp.save(content(model, opt), checkpoint_id=tmp_path / "folder")
    twin, again = pair(dtype, lr=9.0)
    with torch.no_grad():
        for q in twin.parameters():
            q.zero_()
    loaded = content(twin, close(again))
    dcp.load(loaded, checkpoint_id=tmp_path / "folder")
    twin.load_state_dict(loaded["model"])
    set_optimizer_state_dict(twin, again, loaded["optim"], options=options)
    assert_same_states(again, opt, [*STATES, "step"])
    assert again.param_groups[0]["lr"] == 1e-2
    train(model, opt, [3])
    train(twin, again, [3])
    assert_same_states(again, opt, [*STATES, "step"])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(q.detach(), p.detach())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_of_plain_state_dicts(close, tmp_path):
    model, opt = trained(close, torch.bfloat16)
    dcp.save({"model": model.state_dict(), "optim": opt.state_dict()}, checkpoint_id=tmp_path / "folder")
    twin, again = trained(close, torch.bfloat16, steps=1, lr=9.0)
    loaded = {"model": twin.state_dict(), "optim": again.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path / "folder")  # into the optimizer's own memory
    again.load_state_dict(loaded["optim"])
    train(model, opt, [3])
    train(twin, again, [3])
    assert_same_states(again, opt, [*STATES, "step"])
