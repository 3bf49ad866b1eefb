"""A late update uses the hyper-parameters of its own step: groups, schedulers, and every kind of optimizer."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.optim import lr_scheduler

import zofftk
from tests.delayed_rule import HYPER, MODES, Pair, each_delay, each_mode, loss_of, mlp

pytestmark = pytest.mark.usefixtures("no_threads_left", "at_once")

# Of the second and third group, beside the usual ones of the first.
OWN = {
    "AdamW": ({"lr": 3e-2, "betas": (0.8, 0.95), "weight_decay": 0.0}, {"eps": 1e-4, "lr": 1e-3}),
    "Adam": ({"lr": 3e-2, "betas": (0.7, 0.9), "weight_decay": 0.0}, {"eps": 1e-4, "lr": 1e-3}),
    "Lion": ({"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.0}, {"lr": 1e-4}),
    "SGD": ({"lr": 3e-2, "momentum": 0.5, "weight_decay": 0.0}, {"lr": 1e-3, "momentum": 0.1}),
    "nesterov": ({"lr": 3e-2, "momentum": 0.5, "weight_decay": 0.0}, {"lr": 1e-3, "weight_decay": 0.5}),
}


def one_cycle(opt):
    """Moves the learning rates, and the first betas or the momenta against them."""
    return lr_scheduler.OneCycleLR(opt, [0.1, 0.05, 0.02], total_steps=12, base_momentum=0.3, max_momentum=0.95)


SCHEDULES = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, [lambda n, k=k: 1 / (1 + n) ** k for k in (1, 2, 3)]),
    "one cycle": one_cycle,
    "steps": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 2, 5], gamma=0.1),
}


def three_groups(kind):
    def groups(model):
        parts = [[*model[i].parameters()] for i in (0, 2, 4)]
        return [{"params": params, **own} for params, own in zip(parts, ({}, *OWN[kind]), strict=True)]

    return groups


# Each kind with each schedule; each of both in every mode.
CASES = [
    (kind, schedule, list(MODES)[(i + j) % len(MODES)])
    for (i, kind), (j, schedule) in itertools.product(enumerate(HYPER), enumerate(SCHEDULES))
]


@pytest.mark.parametrize(("kind", "schedule", "mode"), CASES)
def test_groups_and_schedules(kind, schedule, mode):
    dtype = torch.float32 if schedule == "steps" else torch.bfloat16
    delay_after = 3 if schedule == "one cycle" else 0
    options = {"delay_after": delay_after, "max_grad_norm": 1.0, "bucket_bytes": 1 << 20}  # the groups share a bucket
    pair = Pair(lambda: mlp(dtype), MODES[mode], kind, groups=three_groups(kind), **options)
    schedules = [SCHEDULES[schedule](each) for each in (pair.opt, pair.plain)]
    for _ in range(8):
        pair.train(loss_of, 1)
        for each in schedules:
            each.step()
    assert pair.opt.param_groups[0]["lr"] == pair.plain.param_groups[0]["lr"] != HYPER[kind]["lr"]
    pair.assert_same()
    pair.close()


@each_mode
def test_hyper_parameters_that_are_written_after_the_step_do_not_reach_what_is_late(mode):
    pair = Pair(mlp, mode)
    for _ in range(6):
        pair.train(loss_of, 1)
        for each in (pair.opt, pair.plain):
            group = each.param_groups[0]
            group["lr"], group["weight_decay"] = group["lr"] * 3, group["weight_decay"] + 0.1
            group["betas"] = (group["betas"][0] - 0.1, group["betas"][1])
    pair.assert_same()
    pair.close()


@each_delay
def test_by_hand_two_steps_with_their_own_rates(delay_after):
    """SGD, p = 1, gradient 1, rates 0.5 and then 0.25: the second rate does not reach the first gradient."""
    p = torch.nn.Parameter(torch.tensor([1.0]))
    opt = zofftk.OffloadSGD([p], lr=0.5, update="delayed", delay_after=delay_after)
    seen = []
    for rate in (0.5, 0.25, 0.125, 0.125, 0.125):
        opt.param_groups[0]["lr"] = rate
        p.sum().backward()
        opt.step()
        opt.zero_grad()
        seen.append(p.item())
    assert seen == ([1.0, 0.5, 0.25, 0.125, 0.0] if delay_after == 0 else [0.5, 0.25, 0.125, 0.125, 0.0])
    opt.close()
    assert p.item() == -0.125


@pytest.mark.parametrize("momenta", [(0.0, 0.9, 0.9, 0.9), (0.9, 0.0, 0.0, 0.5)])
def test_momentum_that_comes_and_goes_while_an_update_is_late(momenta):
    pair = Pair(mlp, {}, "SGD")
    for momentum in momenta:
        for each in (pair.opt, pair.plain):
            each.param_groups[0]["momentum"] = momentum
        pair.train(loss_of, 1)
    pair.assert_same()
    pair.close()
