"""What users do to `optimizer.state`, to kept gradients and to options between steps, beside `torch.optim.AdamW`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from zofftk import LossScale
from zofftk.standin import StandInError

pytestmark = pytest.mark.usefixtures("no_threads_left")


def pair(value=1.0, n=4, **options):
    """The same parameter in both optimizers."""
    options = {"lr": 0.1, "weight_decay": 0.0, **options}
    p, q = nn.Parameter(torch.full((n,), value)), nn.Parameter(torch.full((n,), value))
    return (zofftk.OffloadAdamW([p], **options), p), (torch.optim.AdamW([q], **options), q)


def go(optimizer, p, gradient=1.0, times=1):
    for _ in range(times):
        (p * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def both(act, times=3, **options):
    """`act(optimizer, parameter)` in both; they end alike."""
    sides = pair(**options)
    for optimizer, p in sides:
        go(optimizer, p, times=times)
        changed = act(optimizer, p)
        p = p if changed is None else changed
        go(optimizer, p, 0.5)
        go(optimizer, p, -2.0)
    (opt, _), (ref, _) = sides
    (p,), (q,) = opt.param_groups[0]["params"], ref.param_groups[0]["params"]
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    saved = opt.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq", "step"):
        torch.testing.assert_close(torch.as_tensor(saved[name]).float(), torch.as_tensor(ref.state[q][name]).float())
    torch.testing.assert_close(saved["master"], q.detach(), rtol=1e-5, atol=1e-6)
    opt.close()


# -- states --------------------------------------------------------------------------------------------------------


def test_a_loaded_master_does_not_undo_other_weights():
    (opt, p), _ = pair()
    go(opt, p)
    saved = copy.deepcopy(opt.state_dict())
    (other, q), (ref, r) = pair(5.0)
    other.load_state_dict(saved)
    ref.load_state_dict(saved)
    go(other, q)
    go(ref, r)
    torch.testing.assert_close(q, r)
    for each in (opt, other):
        each.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_weights_and_states_may_be_loaded_in_any_order(dtype, first):
    def build():
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(dtype)
        return model, zofftk.OffloadAdamW(model.parameters(), lr=0.01)

    def train(model, opt, steps):
        for _ in range(steps):
            model(torch.ones(2, 4, dtype=dtype)).float().square().sum().backward()
            opt.step()
            opt.zero_grad()

    model, opt = build()
    train(model, opt, 3)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    train(model, opt, 2)
    other, resumed = build()
    train(other, resumed, 1)
    loads = [lambda: other.load_state_dict(weights), lambda: resumed.load_state_dict(states)]
    for load in loads if first == "model" else reversed(loads):
        load()
    train(other, resumed, 2)
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())
        assert_same_bits(resumed.state[p]["master"], opt.state[q]["master"])
    for each in (opt, resumed):
        each.close()


def test_states_that_go_through_torch_and_back():
    (opt, p), (ref, q) = pair()
    go(opt, p, times=2)
    ref.load_state_dict(opt.state_dict())
    q.data.copy_(p.detach())
    go(ref, q, times=3)
    (back, r), _ = pair()
    back.load_state_dict(ref.state_dict())  # with the master of long ago
    with torch.no_grad():
        r.copy_(q)
    go(back, r)
    go(ref, q)
    torch.testing.assert_close(r, q, rtol=1e-5, atol=1e-6)
    for each in (opt, back):
        each.close()


def carry_over(optimizer, p):
    new = nn.Parameter(torch.full((4,), 7.0))
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = optimizer.state.pop(p)
    return new


def replace_state(optimizer, p):
    state = {key: value.clone() for key, value in optimizer.state[p].items()}
    optimizer.state[p] = {**state, "step": torch.tensor(50.0), "exp_avg": torch.ones(4)}


def reset_in_place(optimizer, p):
    for value in (optimizer.state[p][key] for key in ("step", "exp_avg", "exp_avg_sq")):
        value.zero_()


def replace_step(optimizer, p):
    optimizer.state[p]["step"] = torch.tensor(50.0)


def delete_state(optimizer, p):
    del optimizer.state[p]


def clear_states(optimizer, p):
    optimizer.state.clear()


@pytest.mark.parametrize(
    "act", [carry_over, replace_state, reset_in_place, replace_step, delete_state, clear_states, lambda o, p: None]
)
def test_edits_of_the_state_are_taken_over(act):
    both(act)


def test_a_state_set_before_the_first_step():
    both(replace_state_fresh, times=0)


def replace_state_fresh(optimizer, p):
    moments = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    optimizer.state[p] = {"step": torch.tensor(100.0), **moments}


def test_what_is_no_state_is_refused_before_anything():
    (opt, p), _ = pair()
    go(opt, p)
    before = opt.state[p]["master"].clone()
    opt.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(4)}
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 of group 0 has shape \(3,\), expected \(4,\)"):
        go(opt, p)
    assert_same_bits(p.detach(), before)
    opt.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.update(loss_scale={}),
        lambda d: d["state"][1].update(exp_avg=torch.ones(4, device="meta")),
        lambda d: d["state"][1].update(exp_avg=torch.ones(4).to_sparse()),
        lambda d: d["param_groups"][0].update(maximize=True),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(spoil):
    params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    opt = zofftk.OffloadAdamW(params, lr=0.1, loss_scale=LossScale())
    files = []
    for gradient in (1.0, 3.0):
        opt.scale_loss(sum((p * gradient).sum() for p in params)).backward()
        opt.step()
        opt.zero_grad()
        files.append(copy.deepcopy(opt.state_dict()))
    saved = files[0]
    spoil(saved)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match="the saved|not offered"):
        opt.load_state_dict(saved)
    after = opt.state_dict()
    for key in (0, 1):
        for name in ("exp_avg", "exp_avg_sq", "master", "step"):
            assert torch.equal(after["state"][key][name], before["state"][key][name])
    opt.close()


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["amsgrad", "maximize", "differentiable"])
def test_options_of_torchs_that_would_train_differently_are_refused(key):
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=f"{key} is an option of torch's that is not offered here"):
        zofftk.OffloadAdamW([{"params": [p], key: True}])
    opt = zofftk.OffloadAdamW([{"params": [p], key: False}])
    opt.close()


def test_hyper_parameters_are_checked_in_the_step():
    (opt, p), _ = pair()
    opt.param_groups[0]["betas"] = (1.0, 0.999)
    with pytest.raises(ValueError, match="betas must be two numbers in"):
        go(opt, p)
    assert (p == 1.0).all()
    opt.close()


def test_groups_may_grow():
    params = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
    opt = zofftk.OffloadAdamW([{"params": [(n, params[n])]} for n in "ab"], lr=0.1, weight_decay=0.0)
    opt.param_groups[0]["params"].append(opt.param_groups[1]["params"].pop())
    opt.param_groups[0]["params"].append(params["c"])
    sum(p.sum() for p in params.values()).backward()
    opt.step()
    for p in params.values():
        assert opt.state[p]["step"] == 1
    wrong = nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt.param_groups[0]["params"].append(wrong)
    with pytest.raises(TypeError, match="parameter 3 of group 0 is torch.float64"):
        opt.zero_grad()
    opt.close()


def test_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        p = nn.Parameter(torch.ones(2, dtype=torch.float32))
        opt = zofftk.OffloadAdamW([p])
        (p * 1.001953125).sum().backward()
        assert opt.grad(p).dtype == torch.float32
        assert opt.grad(p)[0] == 1.001953125
        opt.step()
        assert opt.state[p]["step"].dtype == torch.float32
        opt.close()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_lazy_parameter_is_refused():
    with pytest.raises(TypeError, match="is not initialised yet, expected a tensor with data: run a forward before"):
        zofftk.OffloadAdamW(nn.LazyLinear(2).parameters())


def test_a_later_optimizer_over_the_same_parameters_closes_the_first(caplog):
    (opt, p), _ = pair()
    go(opt, p)
    second = zofftk.OffloadAdamW([p], lr=0.1)
    assert "an optimizer was closed, because a later one takes gradients of its parameters" in caplog.text
    go(second, p)
    assert second.state[p]["step"] == 1
    with pytest.raises(RuntimeError, match="this optimizer is closed"):
        opt.step()
    second.close()


# -- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [lambda g: g.float(), lambda g: g.half(), lambda g: g.double()])
def test_a_converted_gradient_does_not_change_the_gradient(convert):
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = zofftk.OffloadAdamW([p])
    (p * 2).sum().backward()
    copied = convert(p.grad.detach())
    assert copied.norm().item() == 4.0
    for change in (lambda: copied.mul_(0.5), lambda: copied.zero_(), lambda: copied.add_(torch.ones(4))):
        with pytest.raises(StandInError, match="changing a converted copy of p.grad needs the values"):
            change()
    assert opt.grad(p).tolist() == [2.0] * 4
    opt.close()


def test_a_kept_gradient_does_not_become_the_next():
    (opt, p), _ = pair()
    (p * 2).sum().backward()
    kept = p.grad
    opt.step()
    opt.zero_grad()
    (p * 5).sum().backward()
    assert p.grad is not kept
    with pytest.raises(StandInError, match="this gradient was dropped"):
        kept.mul_(0)
    assert opt.grad(p)[0] == 5.0
    opt.close()


def test_dividing_a_gradient_by_zero_skips_the_step():
    (opt, p), _ = pair()
    p.sum().backward()
    p.grad.div_(0.0)
    with pytest.warns(RuntimeWarning, match="a step was skipped"):
        opt.step()
    assert opt.skipped_steps == 1
    opt.close()


@pytest.mark.parametrize("clear", [True, False])
def test_an_unfrozen_parameter_takes_part_from_its_first_backward(clear):
    frozen, other = nn.Parameter(torch.ones(4).half(), requires_grad=False), nn.Parameter(torch.ones(4).half())
    opt = zofftk.OffloadAdamW([frozen, other], loss_scale=LossScale(initial=1024.0))
    frozen.requires_grad_()
    if clear:
        opt.zero_grad()
    opt.scale_loss((frozen * 3).sum().float() + (other * 4).sum().float()).backward()
    assert torch.nn.utils.clip_grad_norm_([frozen, other], 1.0).item() == 10.0
    assert opt.grad(frozen)[0].item() == pytest.approx(0.3)
    opt.step()
    assert opt.last_grad_norm == pytest.approx(1.0)
    opt.close()


def test_an_fp16_parameter_that_was_unfrozen_and_a_grad_scaler():
    frozen, other = nn.Parameter(torch.ones(4).half(), requires_grad=False), nn.Parameter(torch.ones(4).half())
    opt = zofftk.OffloadAdamW([frozen, other])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    frozen.requires_grad_()
    opt.zero_grad()
    scaler.scale((frozen.sum() + other.sum()).float()).backward()
    scaler.step(opt)
    assert opt.state[frozen]["exp_avg"].tolist() == pytest.approx([0.1] * 4)
    opt.close()


def test_gradients_of_an_unfrozen_parameter_can_be_read_and_written():
    p = nn.Parameter(torch.ones(2), requires_grad=False)
    opt = zofftk.OffloadAdamW([p, nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"grad\(\) expects a trainable parameter"):
        opt.grad(p)
    p.requires_grad_()
    p.sum().backward()
    assert opt.grad(p).tolist() == [1.0, 1.0]
    opt.set_grad(p, torch.full((2,), 3.0))
    assert opt.grad(p).tolist() == [3.0, 3.0]
    opt.close()


def test_gradients_keep_their_value_when_the_scale_changes():
    w, v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    opt = zofftk.OffloadAdamW([w, v], loss_scale=LossScale(initial=8.0))
    opt.scale_loss((w * 2).sum() + (v * float("inf")).sum()).backward()
    opt.step()
    assert opt.loss_scale == 4.0
    assert opt.grad(w)[0] == 2.0
    assert w.grad.norm().item() == 4.0
    v.grad = None
    opt.step()
    assert opt.last_grad_norm == 4.0
    opt.zero_grad()
    saved = opt.state_dict()
    saved["loss_scale"] = {"value": 64.0, "good_steps": 0}
    opt.scale_loss((w * 2).sum()).backward()
    opt.load_state_dict(saved)
    assert opt.grad(w)[0] == 2.0
    opt.close()
