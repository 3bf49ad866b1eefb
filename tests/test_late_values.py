"""Values that a delayed update holds back, while parameters are loaded, written to, frozen, replaced or closed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from tests.test_delayed import HYPER, delayed, mlp, train
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left")
each_order = pytest.mark.parametrize("order", ["model first", "optimizer first"])


def late_run(steps=4, dtype=torch.bfloat16, **options):
    """A run whose last update is late, and what was saved of it."""
    model = mlp(dtype)
    opt = delayed(model, **options)
    train(model, opt, range(steps))
    return model, opt, copy.deepcopy({"model": model.state_dict(), "optimizer": opt.state_dict()})


def load(model, opt, saved, order):
    loads = [lambda: model.load_state_dict(saved["model"]), lambda: opt.load_state_dict(saved["optimizer"])]
    for one in loads if order == "model first" else reversed(loads):
        one()


def assert_same_parameters(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())


@each_order
@pytest.mark.parametrize("update", ["synchronous", "delayed"])
def test_flushed_right_after_loading(order, update):
    model, opt, saved = late_run()
    second = mlp()
    resumed = delayed(second)
    resumed.switch_update(update)
    load(second, resumed, saved, order)
    for each in (opt, resumed):
        each.flush()
    assert_same_parameters(second, model)
    for each in (opt, resumed):
        each.close()


@each_order
@pytest.mark.parametrize("update", ["synchronous", "delayed"])
def test_loaded_by_a_policy_that_does_not_delay_yet(order, update):
    """What was late goes out with the first step, once."""
    model, opt, saved = late_run()
    second = mlp()
    resumed = zofftk.OffloadAdamW(second.parameters(), **HYPER, update=update, delay_after=99, bucket_bytes=3000)
    load(second, resumed, saved, order)
    again = copy.deepcopy(resumed.state_dict())
    assert again["delayed"]["late"] == saved["optimizer"]["delayed"]["late"] == list(range(6))
    expected = train(model, opt, range(4, 5))  # the forward still sees the saved weights
    torch.testing.assert_close(train(second, resumed, range(4, 5)), expected, rtol=0, atol=0)
    opt.switch_update("synchronous")
    assert_same_parameters(second, model)
    train(model, opt, range(5, 7))
    train(second, resumed, range(5, 7))
    assert_same_parameters(second, model)
    for each in (opt, resumed):
        each.close()
    assert_same_parameters(second, model)


def test_loading_an_earlier_state_drops_what_is_late():
    model = mlp()
    opt = delayed(model)
    before, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    train(model, opt, range(1))
    opt.load_state_dict(saved)  # without states: as if there had been no step
    opt.zero_grad(set_to_none=False)
    opt.param_groups[0]["weight_decay"] = 0.0
    opt.step()
    opt.close()
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_parameter_that_was_frozen_while_it_was_late(frozen_first):
    def freeze(model):
        model[0].weight.requires_grad_(False)

    model = mlp()
    opt = delayed(model)
    train(model, opt, range(2))
    freeze(model)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": opt.state_dict()})
    second = mlp()
    if frozen_first:
        freeze(second)
    resumed = delayed(second)
    load(second, resumed, saved, "model first")
    freeze(second)
    for each, o in ((model, opt), (second, resumed)):
        train(each, o, range(2, 4))
        o.close()
    assert_same_parameters(second, model)


@pytest.mark.parametrize("how", ["flush", "switch_update", "state_dict"])
def test_a_write_is_refused_before_anything_else(how):
    model, opt, _ = late_run()
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    with pytest.raises(RuntimeError, match=r"group 0.*was written to while a delayed update|'0.weight' was written"):
        {"flush": opt.flush, "switch_update": lambda: opt.switch_update("synchronous"), "state_dict": opt.state_dict}[
            how
        ]()
    assert (model[0].weight == 5.0).all()
    opt.refresh()
    getattr(opt, how)(*["synchronous"] * (how == "switch_update"))
    opt.close()
    assert (model[0].weight == 5.0).all()


def test_a_write_stands_at_the_end(caplog):
    """As where the best weights are put back after training."""
    model, opt, _ = late_run()
    twin, other, _ = late_run()
    best = {"0.weight": torch.full((70, 16), 5.0, dtype=torch.bfloat16), "0.bias": torch.ones(70)}
    model.load_state_dict(best, strict=False)
    for each in (opt, other):
        each.close()
    assert (model[0].weight == 5.0).all()
    assert_same_bits(model[2].weight.detach(), twin[2].weight.detach())
    assert "'0.weight' and 1 more: written to, so the delayed update under way is dropped" in caplog.text


@each_order
def test_a_refresh_after_loading_keeps_what_is_late(order):
    model, opt, saved = late_run()
    second = mlp()
    resumed = delayed(second)
    load(second, resumed, saved, order)
    resumed.refresh()
    for each, o in ((model, opt), (second, resumed)):
        train(each, o, range(4, 6))
        o.close()
    assert_same_parameters(second, model)


def test_parameters_that_are_replaced_while_they_are_late():
    model, opt, _ = late_run()
    new = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(new, assign=True)
    opt.adopt_replaced()
    opt.flush()
    for value in model.state_dict().values():
        assert (value == 0.25).all()
    train(model, opt, range(4, 6))
    opt.close()


def test_flushed_while_the_last_late_values_are_on_their_way():
    model, twin = mlp(), mlp()
    device = EmulatedDevice(delays=1, max_delay_ms=2.0, poison=True)
    opt, plain = delayed(model, device=device, bucket_bytes=None), delayed(twin)
    zofftk.offload(model, opt)
    for _ in range(4):
        for each, o in ((model, opt), (twin, plain)):
            train(each, o, range(2))
            o.flush()
        assert opt._engine.ring.free == 3
        assert_same_parameters(model, twin)
    for each in (opt, plain):
        each.close()


def test_a_state_that_was_deleted_while_its_parameter_was_late():
    model, opt, _ = late_run()
    twin, other, _ = late_run()
    del opt.state[model[0].weight]
    saved = opt.state_dict()
    assert saved["delayed"]["late"] == [1, 2, 3, 4, 5]
    second = nn.Sequential(*copy.deepcopy(twin))
    resumed = delayed(second)
    resumed.load_state_dict(saved)
    for each in (opt, other, resumed):
        each.close()
    assert_same_parameters(model, twin)  # its last value is sent all the same
