"""What becomes of a parameter that its user has changed between two steps: taken over, or refused before anything."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits

pytestmark = pytest.mark.usefixtures("no_threads_left")


def build(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(dtype)
    opt = zofftk.OffloadAdamW(model.named_parameters(), **{"lr": 0.1, "weight_decay": 0.0, **options})
    return model, opt


def step(model, opt):
    opt.zero_grad()
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 8, dtype=dtype)).float().square().sum().backward()
    opt.step()


def masters(opt, model):
    return [opt.state[p]["master"].clone() for p in model.parameters()]


def assert_follows(opt, model):
    for p in model.parameters():
        assert_same_bits(p.detach(), opt.state[p]["master"].to(p.dtype))


# -- the dtype -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", ["bfloat16", "half"])
@pytest.mark.parametrize("when", ["before the first step", "between steps", "with a used gradient", "with a gradient"])
def test_a_narrower_dtype_is_taken_over(convert, when):
    model, opt = build()
    expected = [p.detach().clone() for p in model.parameters()]
    if when != "before the first step":
        step(model, opt)
        expected = masters(opt, model)
    if when == "between steps":
        opt.zero_grad()
    if when == "with a gradient":
        opt.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        gathered = [opt.grad(p) for p in model.parameters()]
    getattr(model, convert)()
    if when == "with a gradient":
        for p, grad in zip(model.parameters(), gathered, strict=True):
            assert_same_bits(opt.grad(p), grad)
    for group in opt.param_groups:
        group["lr"] = 0.0
    step(model, opt)
    for new, old in zip(masters(opt, model), expected, strict=True):
        assert_same_bits(new, old)  # the masters keep what the parameters have lost
    for group in opt.param_groups:
        group["lr"] = 0.1
    for _ in range(2):
        step(model, opt)
    assert_follows(opt, model)
    assert all(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    opt.close()


def test_a_grad_scaler_works_after_half():
    model, opt = build()
    step(model, opt)
    model.half()
    opt.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 8).half()).float().sum()).backward()
    scaler.unscale_(opt)
    assert opt.grad(model[1].bias).tolist() == [2.0, 2.0]
    scaler.step(opt)
    assert_follows(opt, model)
    opt.close()


@pytest.mark.parametrize(
    ("dtype", "convert", "message"),
    [
        (torch.bfloat16, "float", "'0.weight' is torch.float32, which does not fit into the torch.bfloat16"),
        (torch.bfloat16, "half", "'0.weight' is torch.float16, which does not fit into the torch.bfloat16"),
        (torch.float32, "double", "'0.weight' is torch.float64, which does not fit into the torch.float32"),
    ],
)
def test_a_dtype_that_the_wire_cannot_carry_is_refused(dtype, convert, message):
    model, opt = build(dtype)
    step(model, opt)
    before = masters(opt, model)
    opt.zero_grad()
    getattr(model, convert)()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=message):
        opt.step()
    for new, old in zip(masters(opt, model), before, strict=True):
        assert_same_bits(new, old)
    assert all(opt.state[p]["step"] == 1 for p in model.parameters())
    opt.close()


def test_a_dtype_that_the_wire_cannot_carry_is_refused_in_backward():
    model, opt = build(torch.bfloat16)
    model.float()
    with pytest.raises(RuntimeError, match=r"'1.\w+' is torch.float32, .*build the optimizer after the change"):
        model(torch.ones(2, 8)).sum().backward()
    opt.close()


# -- the storage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_storage_is_taken_over(dtype):
    """`p.data = ...` leaves the version counter as it was."""
    model, opt = build(dtype)
    step(model, opt)
    for p in model.parameters():
        p.data = torch.full_like(p, 5.0)
    step(model, opt)
    for p, master in zip(model.parameters(), masters(opt, model), strict=True):
        assert 4.5 < master.min() <= master.max() < 5.5
        assert_same_bits(p.detach(), master.to(dtype))
    opt.close()


def test_the_documented_gap_and_its_remedy():
    """A write through `p.data` leaves no trace: the next step overwrites it, unless refresh() is called."""
    for refresh in (False, True):
        model, opt = build()
        step(model, opt)
        model[0].weight.data.fill_(5.0)
        if refresh:
            opt.refresh()
        step(model, opt)
        assert bool((model[0].weight > 4.0).all()) == refresh
        opt.close()


def test_another_shape_is_refused():
    model, opt = build()
    step(model, opt)
    opt.zero_grad()
    model[1].weight.data = torch.ones(3, 8)
    model[1].weight.grad = torch.ones(3, 8)
    with pytest.raises(RuntimeError, match=r"'1.weight' has shape \(3, 8\), it had \(2, 8\) when the optimizer was"):
        opt.step()
    opt.close()


# -- the object ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepped", [0, 2])
def test_b07_assigned_weights_are_adopted(stepped):
    """`load_state_dict(assign=True)` puts other Parameter objects into the modules."""

    def train(assign):
        model, opt = build()
        for _ in range(stepped):
            step(model, opt)
        loaded = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
        model.load_state_dict(loaded, assign=assign)
        opt.adopt_replaced()
        for _ in range(3):
            step(model, opt)
        groups = [id(p) for group in opt.param_groups for p in group["params"]]
        assert groups == [id(p) for p in model.parameters()]
        assert [opt.state[p]["step"].item() for p in model.parameters()] == [3.0 + stepped] * 4
        assert_follows(opt, model)
        opt.close()
        return model

    for p, q in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())


def test_an_assigned_weight_that_is_trained_is_refused():
    model, opt = build()
    step(model, opt)
    before = masters(opt, model)
    model[1].load_state_dict(model[1].state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"'1.weight' is another object in its module now.*adopt_replaced\(\)"):
        step(model, opt)
    assert_same_bits(opt.state[model[0].weight]["master"], before[0])
    opt.adopt_replaced()
    step(model, opt)
    assert opt.state[model[1].weight]["step"] == 2
    opt.close()


def test_an_adopted_weight_takes_part_in_everything_before_the_step():
    """Unscaling, clipping and zero_grad see it from its first backward on."""
    model, opt = build(torch.bfloat16)
    model[1].load_state_dict(model[1].state_dict(), assign=True)
    opt.adopt_replaced()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    model(x).sum().backward()
    opt.zero_grad()
    scaler.scale(model(x).float().sum()).backward()
    scaler.unscale_(opt)
    assert opt.grad(model[1].bias).tolist() == [2.0, 2.0]
    scaler.step(opt)
    assert opt.state[model[1].bias]["exp_avg"].tolist() == pytest.approx([0.2, 0.2])
    opt.close()


def test_a_new_parameter_in_the_place_of_an_old_one():
    model, opt = build()
    step(model, opt)
    old = model[1].weight
    new = model[1].weight = nn.Parameter(torch.ones(2, 8))
    opt.adopt_replaced()
    step(model, opt)
    step(model, opt)
    assert old.grad is None
    assert not old._post_accumulate_grad_hooks
    assert (new != 1.0).all()
    assert opt.state[new]["step"] == 3
    assert old not in opt.state
    assert "param_groups" in opt.state_dict()
    opt.close()


def test_an_object_that_is_swapped_in_and_out_changes_nothing():
    """As for an evaluation with averaged weights."""
    model, opt = build()
    step(model, opt)
    own = model[1].weight
    model[1].weight = nn.Parameter(torch.zeros(2, 8))
    model(torch.ones(1, 8))
    model[1].weight = own
    step(model, opt)
    assert opt.state[own]["step"] == 2
    opt.close()


def test_untied_weights_stay_where_they_are_used():
    """The old object still has its other use, so the optimizer keeps it; the new one is not its business."""
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    model["second"].weight = model["first"].weight
    opt = zofftk.OffloadAdamW(model.named_parameters(), lr=0.1)
    model["second"].weight = nn.Parameter(torch.ones(4, 4))
    opt.step()
    model["second"](model["first"](torch.ones(1, 4))).sum().backward()
    opt.step()
    assert opt.state[model["first"].weight]["step"] == 1
    assert model["second"].weight not in opt.state
    assert (model["second"].weight == 1.0).all()
    opt.close()


def test_a_parameter_of_another_optimizer_is_left_to_it():
    model, opt = build()
    step(model, opt)
    new = model[1].weight = nn.Parameter(torch.ones(2, 8))
    other = zofftk.OffloadAdamW([new], lr=0.5)
    step(model, opt)
    assert new not in opt.state
    other.step()
    assert other.state[new]["step"] == 1
    opt.close()
    other.close()


def test_an_object_of_another_shape_is_refused():
    model, opt = build()
    step(model, opt)
    opt.zero_grad()
    before = masters(opt, model[:1])
    model[1] = nn.Linear(8, 2)
    model[1].weight = nn.Parameter(torch.ones(2, 8))
    model[0].weight = nn.Parameter(torch.ones(4, 8))
    model[0].bias.grad = torch.ones(8)
    with pytest.raises(RuntimeError, match=r"'0.weight' has shape \(4, 8\), it had \(8, 8\)"):
        opt.adopt_replaced()
    assert_same_bits(opt.state[model[0].bias]["master"], before[1])
    opt.close()


def test_copies_of_the_model_are_not_replacements():
    model, opt = build()
    twin = copy.deepcopy(model)
    twin[0].weight = nn.Parameter(torch.zeros(8, 8))
    step(model, opt)
    assert opt.state[model[0].weight]["step"] == 1
    assert not twin[0].weight.any()
    opt.close()
