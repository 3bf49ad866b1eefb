"""A delayed run with a save and a resume in it has the bits of one without, whichever way the state travels."""

from __future__ import annotations

import copy
import itertools

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
from tests.delayed_rule import HYPER, Pair, each_mode, loss_of, mlp
from zofftk import LossScale

pytestmark = [
    pytest.mark.usefixtures("no_threads_left", "at_once"),
    pytest.mark.filterwarnings("ignore:a step was skipped"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
STEPS = 9


def zofftk_file(folder, first, second, order):
    zofftk.save(folder / "file.pt", {"model": first[0].state_dict(), "optimizer": first[1].state_dict()})
    return zofftk.load(folder / "file.pt")


def torch_file(folder, first, second, order):
    torch.save({"model": first[0].state_dict(), "optimizer": first[1].state_dict()}, folder / "file.pt")
    return torch.load(folder / "file.pt", weights_only=True)


def distributed_files(folder, first, second, order):
    """Of plain state dicts, read into the optimizer's own memory."""
    dcp.save({"model": first[0].state_dict(), "optimizer": first[1].state_dict()}, checkpoint_id=folder)
    content = {"model": second[0].state_dict(), "optimizer": second[1].state_dict()}
    dcp.load(content, checkpoint_id=folder)
    return content


PLAIN_WAYS = {"zofftk.save": zofftk_file, "torch.save": torch_file}
ORDERS = {"model first": ("model", "optimizer"), "optimizer first": ("optimizer", "model")}


def load_into(second, saved, order):
    for part, each in zip(("model", "optimizer"), second, strict=True):
        if order[0] != part:
            continue
        each.load_state_dict(saved[part])
    second[("model", "optimizer").index(order[1])].load_state_dict(saved[order[1]])


def resume(pair, folder, way=zofftk_file, order=("model", "optimizer"), **options):
    """The pair's engine goes on in another model and optimizer, which have been trained before."""
    model, opt = pair.model, pair.opt
    pair.model, pair.opt = pair.offloaded(**options)
    for step in range(5):
        loss_of(pair.model, 50 + step).backward()
        pair.opt.step()
        pair.opt.zero_grad()
    saved = way(folder, (model, opt), (pair.model, pair.opt), order)
    load_into((pair.model, pair.opt), saved, order)
    opt.zero_grad()
    return model, opt


def train(pair, steps, overflows=()):
    for _ in range(steps):
        bad = pair.steps in overflows
        pair.train(lambda model, step, bad=bad: loss_of(model, step) * (float("inf") if bad else 1.0), 1)


# The save comes before the delay begins, at its boundary, right after it, later, and right after an overflow.
each_moment = pytest.mark.parametrize(
    ("at", "overflows", "delay_after"),
    [(2, (), 3), (3, (), 3), (4, (), 3), (6, (5,), 3), (4, (3,), 3), (3, (2,), 3), (1, (0,), 0), (5, (), 0)],
)


@each_mode
@each_moment
def test_a_resumed_run_has_the_same_bits(mode, at, overflows, delay_after, tmp_path):
    ways = itertools.cycle(itertools.product(PLAIN_WAYS.values(), ORDERS.values()))
    for way, order in itertools.islice(ways, at, at + 2):
        pair = Pair(mlp, mode, delay_after=delay_after, max_grad_norm=0.5)
        train(pair, at, overflows)
        resume(pair, tmp_path, way, order, bucket_bytes=20_000, max_grad_norm=0.5)[1].close()
        train(pair, STEPS - at, overflows)
        pair.assert_same()
        pair.close()


@each_mode
def test_saving_flushes_nothing_and_changes_nothing(mode, tmp_path):
    pair = Pair(mlp, mode, delay_after=2, max_grad_norm=0.5)
    for step in range(STEPS):
        train(pair, 1)
        (zofftk_file, torch_file)[step % 2](tmp_path, (pair.model, pair.opt), None, ())
    pair.assert_same()
    pair.close()


@each_mode
@pytest.mark.parametrize("kind", HYPER)
def test_each_optimizer_resumes(mode, kind, tmp_path):
    pair = Pair(lambda: mlp(torch.float32), mode, kind)
    for order in ORDERS.values():
        train(pair, 3)
        resume(pair, tmp_path, torch_file, order)[1].close()
    train(pair, 3)
    pair.assert_same()
    pair.close()


@each_mode
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"delay_after": 0}, {"update": "synchronous"}),
        ({"delay_after": 0}, {"delay_after": 7}),
        ({"delay_after": 7}, {"delay_after": 0}),
        ({"update": "synchronous"}, {"delay_after": 6}),
    ],
)
def test_another_policy_on_load(mode, order, before, after, tmp_path):
    """What is late comes with the next step; `delay_after` counts from the first step of all."""

    def delay_of(options):
        return 1000 if options.get("update") == "synchronous" else options["delay_after"]

    pair = Pair(mlp, mode, **{"delay_after": 0, **before, "max_grad_norm": 0.5})
    pair.plain.delay_after = delay_of(before)
    train(pair, 4)
    resume(pair, tmp_path, order=ORDERS[order], max_grad_norm=0.5, **{"delay_after": 0, **after})[1].close()
    pair.plain.delay_after = delay_of(after)
    pair.assert_same_params()
    resume(pair, tmp_path, order=ORDERS[order], max_grad_norm=0.5, **{"delay_after": 0, **after})[1].close()
    train(pair, 5)
    pair.assert_same()
    pair.close()


@pytest.mark.parametrize("order", ORDERS)
def test_a_delayed_state_in_a_synchronous_optimizer_that_is_flushed(order, tmp_path):
    pair = Pair(mlp, {})
    train(pair, 4)
    resume(pair, tmp_path, order=ORDERS[order], update="synchronous")[1].close()
    pair.assert_same()
    pair.close()


@pytest.mark.parametrize("order", ORDERS)
def test_a_parameter_that_is_frozen_by_now_gets_the_value_that_was_late(order, tmp_path):
    def freeze(model):
        model[0].weight.requires_grad_(False)
        return model

    pair = Pair(mlp, {})
    train(pair, 2)
    freeze(pair.twin)
    saved = zofftk_file(tmp_path, (freeze(pair.model), pair.opt), None, ())
    pair.opt.close()
    pair.build = lambda: freeze(mlp())
    pair.model, pair.opt = pair.offloaded()
    load_into((pair.model, pair.opt), saved, ORDERS[order])
    train(pair, 2)
    pair.assert_same()
    pair.close()


@pytest.mark.parametrize("order", ORDERS)
def test_a_state_that_was_deleted_while_its_parameter_was_late(order):
    """Its master is saved nowhere, so the weight counts."""
    pair = Pair(mlp, {})
    train(pair, 3)
    del pair.opt.state[pair.model[0].weight]
    saved = copy.deepcopy({"model": pair.model.state_dict(), "optimizer": pair.opt.state_dict()})
    assert saved["optimizer"]["delayed"]["late"] == [1, 2, 3, 4, 5]
    model, opt = pair.offloaded()
    load_into((model, opt), saved, ORDERS[order])
    opt.flush()
    assert_same_bits(model[0].weight.detach(), saved["model"]["0.weight"])
    for each in (opt, pair.opt):
        each.close()


def test_a_delayed_state_goes_on_in_torch_and_comes_back():
    """Torch knows of no late update; what it has gone on with is not undone by ours."""
    pair = Pair(lambda: mlp(torch.float32), {})
    train(pair, 4)
    model = mlp(torch.float32)
    model.load_state_dict(pair.model.state_dict())
    plain = torch.optim.AdamW(model.parameters(), **HYPER["AdamW"])
    plain.load_state_dict(copy.deepcopy(pair.opt.state_dict()))
    for step in range(3):
        plain.zero_grad()
        loss_of(model, step).backward()
        plain.step()
    twin, opt = pair.offloaded()
    twin.load_state_dict(model.state_dict())
    opt.load_state_dict(plain.state_dict())
    opt.flush()
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())
    loss_of(twin, 0).backward()
    opt.step()
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())  # late again
    opt.close()
    pair.opt.close()


# -- torch.distributed.checkpoint ----------------------------------------------------------------------------------


def distributed_states(flatten):
    """By torch's functions for it, which name the parameters and keep `state` and `param_groups` alone."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def content(model, opt):
        return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, opt, options=options)}

    def resume_by(pair, folder, order, **options_of_second):
        first = pair.model, pair.opt
        dcp.save(content(*first), checkpoint_id=folder)
        pair.model, pair.opt = pair.offloaded(**options_of_second)
        loaded = content(pair.model, pair.opt)
        dcp.load(loaded, checkpoint_id=folder)
        for part in order:
            if part == "model":
                pair.model.load_state_dict(loaded["model"])
            else:
                set_optimizer_state_dict(pair.model, pair.opt, loaded["optimizer"], options=options)
        first[1].close()

    return resume_by


@each_mode
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(("at", "overflows", "delay_after"), [(4, (), 0), (3, (2,), 3), (4, (1, 2), 3)])
def test_distributed_checkpoints_of_a_delayed_run_with_a_loss_scale(
    mode, flatten, at, overflows, delay_after, tmp_path
):
    scale = {"loss_scale": LossScale(initial=64.0, growth_interval=4), "max_grad_norm": 0.5}
    pair = Pair(mlp, mode, delay_after=delay_after, **scale)

    def train(steps):
        for _ in range(steps):
            value = pair.opt.loss_scale
            factor = value * (float("inf") if pair.steps in overflows else 1.0)
            pair.backward(loss_of, scaled=(lambda loss, by=factor: loss * by,) * 2)
            pair.plain.factor = 1 / value
            pair.step()

    train(at)
    before = pair.opt.loss_scale
    assert before != 64.0 or not overflows
    distributed_states(flatten)(pair, tmp_path / "first", ("model", "optimizer"), bucket_bytes=20_000, **scale)
    assert pair.opt.loss_scale == before
    train(2)
    distributed_states(flatten)(pair, tmp_path / "second", ("optimizer", "model"), **scale)
    train(3)
    pair.assert_same()
    pair.close()


def test_a_distributed_checkpoint_goes_on_synchronously_after_a_switch(tmp_path):
    pair = Pair(mlp, {})
    train(pair, 4)
    distributed_states(False)(pair, tmp_path, ORDERS["model first"])
    pair.opt.switch_update("synchronous")
    pair.plain.flush()
    pair.plain.delay_after = 1000
    train(pair, 3)
    pair.assert_same()
    pair.close()


@each_mode
def test_a_distributed_checkpoint_of_plain_state_dicts(mode, tmp_path):
    """Read into the optimizer's own memory, and then loaded from there."""
    pair = Pair(mlp, mode, delay_after=1)
    train(pair, 4)
    resume(pair, tmp_path, distributed_files)[1].close()
    train(pair, 3)
    pair.assert_same()
    pair.close()
