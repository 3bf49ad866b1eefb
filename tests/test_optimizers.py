"""AdamW, Adam, Lion and SGD through the same line: against torch, against themselves un-bucketed, saved and loaded."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits, assert_within_ulp
from tests.reference.moment import Lion
from tests.reference.unbucketed import Unbucketed
from tests.small_gpt import build, loss_of
from zofftk.device.emulated import EmulatedDevice
from zofftk.optimizer import OffloadOptimizer

pytestmark = pytest.mark.usefixtures("no_threads_left")

# Ours, a plain one of the same rule, and hyper-parameters.
KINDS = {
    "AdamW": (zofftk.OffloadAdamW, torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.1)),
    "Adam": (zofftk.OffloadAdam, torch.optim.Adam, dict(lr=1e-2, weight_decay=0.1)),
    "Lion": (zofftk.OffloadLion, Lion, dict(lr=1e-2, weight_decay=0.1)),
    "SGD": (zofftk.OffloadSGD, torch.optim.SGD, dict(lr=1e-2, weight_decay=0.1)),
    "momentum": (zofftk.OffloadSGD, torch.optim.SGD, dict(lr=1e-2, momentum=0.9, dampening=0.3)),
    "nesterov": (zofftk.OffloadSGD, torch.optim.SGD, dict(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)),
}
SGDS = [
    dict(momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=decay)
    for momentum, dampening, nesterov, decay in itertools.product((0.0, 0.9), (0.0, 0.5), (False, True), (0.0, 0.1))
    if not nesterov or (momentum and not dampening)
]
each_kind = pytest.mark.parametrize("kind", KINDS)


def randn(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(*shape).to(dtype))


def same_gradients(*params):
    grad = torch.randn(params[0].shape)
    for p in params:
        p.grad = grad.to(p.dtype)


# -- against torch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "extra"), [*((kind, {}) for kind in KINDS), *(("SGD", extra) for extra in SGDS)])
def test_each_step_is_torchs_within_ulps(kind, extra):
    """From equal states and the same gradient; ulp of the larger of the old value and the terms added to it."""
    ours, theirs, hyper = KINDS[kind]
    hyper = {**hyper, **extra}
    p = randn(5000)
    q = nn.Parameter(p.detach().clone())
    opt, plain = ours([p], **hyper), theirs([q], **hyper)
    for _ in range(12):
        same_gradients(p, q)
        with torch.no_grad():
            q.copy_(p)
        state = opt.state.get(p, {})
        before = {"master": q.detach().clone(), **{name: value.clone() for name, value in state.items()}}
        for name, value in plain.state[q].items():
            value.copy_(state[name])
        opt.step()
        plain.step()
        terms = q.grad.abs() + 0.1 * before["master"].abs()
        for name in plain.state[q]:
            if name != "step" and plain.state[q][name] is not None:
                old = before.get(name, torch.zeros(5000)).abs()
                size = torch.maximum(old, terms**2 if name == "exp_avg_sq" else terms)
                assert_within_ulp(opt.state[p][name], plain.state[q][name], size, 2, name)
        moved = (q.detach() - before["master"]).abs()
        bound = 4 if kind.startswith("Adam") else 2  # torch's vector square root is off by one in places
        size = torch.maximum(before["master"].abs(), moved + hyper["lr"] * terms)
        assert_within_ulp(opt.state[p]["master"], q.detach(), size, bound, "master")
        opt.zero_grad()
    opt.close()


def test_lion_has_the_bits_of_the_plain_one_over_many_steps():
    p = randn(3000)
    q = nn.Parameter(p.detach().clone())
    hyper = dict(lr=3e-3, betas=(0.95, 0.98), weight_decay=0.2)
    opt, plain = zofftk.OffloadLion([p], **hyper), Lion([q], **hyper)
    for _ in range(100):
        same_gradients(p, q)
        opt.step()
        plain.step()
    assert_same_bits(p.detach(), q.detach())
    assert_same_bits(opt.state[p]["exp_avg"], plain.state[q]["exp_avg"])
    assert opt.state[p]["step"] == 100
    opt.close()


@pytest.mark.parametrize("extra", SGDS)
def test_sgd_stays_close_to_torch_over_many_steps(extra):
    p = randn(3000)
    q = nn.Parameter(p.detach().clone())
    opt, plain = zofftk.OffloadSGD([p], lr=0.01, **extra), torch.optim.SGD([q], lr=0.01, **extra)
    for _ in range(60):
        same_gradients(p, q)
        opt.step()
        plain.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=3e-6)
    opt.close()


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_schedules_empty_and_unused_parameters(kind, dtype):
    """On masters, as torch on fp32 parameters; a parameter is its rounded master."""
    ours, theirs, hyper = KINDS[kind]
    params = [randn(*shape, dtype=dtype) for shape in ((7, 3), (65,), (0, 4), (33,), (5,))]
    masters = [nn.Parameter(p.detach().float().clone()) for p in params]

    def groups(params):
        return [
            {"params": params[:2]},
            {"params": params[2:4], "lr": 0.05, "weight_decay": 0.0},
            {"params": params[4:]},
        ]

    opt, plain = ours(groups(params), **hyper), theirs(groups(masters), **hyper)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (opt, plain)]
    for step in range(5):
        for p, q in zip(params[:4], masters, strict=False):
            if step or p is not params[1]:
                p.grad = torch.randn(p.shape).to(dtype)
                q.grad = p.grad.float()
        opt.step()
        plain.step()
        opt.zero_grad()
        plain.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert not opt.state.get(params[4])
    assert_same_bits(params[4].detach(), masters[4].to(dtype))
    for p, q in zip(params[:4], masters, strict=False):
        torch.testing.assert_close(opt.state[p]["master"], q.detach(), rtol=1e-5, atol=1e-6)
        assert_same_bits(p.detach(), opt.state[p]["master"].to(dtype))
    assert [opt.state[p]["step"] for p in params[:4]] == [5, 4, 5, 5]
    opt.close()


# -- against themselves --------------------------------------------------------------------------------------------


def train(kind, steps=6, model=None, hand_over=False, **options):
    ours, _, hyper = KINDS[kind]
    model = build(options.pop("dtype", torch.bfloat16)) if model is None else model
    opt = ours(model.parameters(), **hyper, **options)
    if hand_over:
        zofftk.offload(model, opt)
    for step in range(steps):
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    return model, opt


def train_plainly(kind, dtype=torch.bfloat16, max_grad_norm=None, steps=6):
    ours, _, hyper = KINDS[kind]
    model = build(dtype)
    like = ours([nn.Parameter(torch.zeros(1))], **hyper)
    reference = Unbucketed(list(model.parameters()), ours.rule, like.param_groups[0], max_grad_norm)
    like.close()
    for step in range(steps):
        reference.step(torch.autograd.grad(loss_of(model, step), reference.params))
    return reference


def assert_ends_as(model, opt, reference):
    for name, flat in {"master": reference.master, **reference.moments}.items():
        for p, value in zip(model.parameters(), reference.split(flat), strict=True):
            assert_same_bits(opt.state[p][name], value, name)
    for p, q in zip(model.parameters(), reference.params, strict=True):
        assert_same_bits(p, q)
        assert set(opt.state[p]) == {"step", "master", *reference.moments}
    opt.close()


@each_kind
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_one_unbucketed_update(kind, dtype, max_grad_norm):
    reference = train_plainly(kind, dtype, max_grad_norm)
    for bucket_bytes in (1, 24 * 1024, 1 << 24):
        options = dict(dtype=dtype, max_grad_norm=max_grad_norm, bucket_bytes=bucket_bytes)
        assert_ends_as(*train(kind, **options), reference)


@each_kind
@pytest.mark.parametrize("hand_over", [False, True])
def test_timing_changes_no_bit(kind, hand_over):
    reference = train_plainly(kind, max_grad_norm=0.5)
    for seed in range(2):
        device = EmulatedDevice(delays=seed, max_delay_ms=0.3, poison=True)
        options = dict(device=device, bucket_bytes=16 * 1024, max_grad_norm=0.5)
        assert_ends_as(*train(kind, hand_over=hand_over, **options), reference)


@each_kind
def test_accumulated_and_scaled_gradients_arrive_scaled(kind):
    """A loss scale and two halves of a loss are the loss, in powers of two."""
    results = []
    for scale, parts in ((None, 1), (256.0, 1), (16.0, 2)):
        p = nn.Parameter(torch.linspace(-1, 1, 777))
        opt = KINDS[kind][0]([p], **KINDS[kind][2], loss_scale=scale, max_grad_norm=1.0)
        for step in range(3):
            torch.manual_seed(step)
            values = torch.randn(777)
            for _ in range(parts):
                opt.scale_loss((p * values / parts).sum()).backward()
            opt.step()
            opt.zero_grad()
        results.append(p.detach())
        opt.close()
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@each_kind
@pytest.mark.filterwarnings("ignore:a step was skipped")
def test_a_skipped_step_changes_nothing(kind):
    p = randn(300, dtype=torch.float16)
    q = nn.Parameter(p.detach().clone())
    opts = [KINDS[kind][0]([x], **KINDS[kind][2]) for x in (p, q)]
    for step in range(4):
        if step % 2 == 0:
            p.grad = torch.full_like(p, float("inf"))
            opts[0].step()
            assert opts[0].last_step_skipped
        same_gradients(p, q)
        for opt in opts:
            opt.step()
    assert_same_bits(p.detach(), q.detach())
    for name, value in opts[1].state[q].items():
        assert_same_bits(opts[0].state[p][name], value, name)
    assert opts[0].skipped_steps == 2
    for opt in opts:
        opt.close()


@pytest.mark.parametrize(
    ("kind", "states"), [("AdamW", 2), ("Adam", 2), ("Lion", 1), ("SGD", 0), ("momentum", 1), ("nesterov", 1)]
)
def test_the_host_holds_the_states_of_the_rule_and_no_more(kind, states):
    p = randn(10 * 4096, dtype=torch.bfloat16)
    opt = KINDS[kind][0]([p], **KINDS[kind][2])
    for _ in range(2):
        assert opt.report().host_bytes == (4 + 4 * states + 2) * p.numel() + 8 * 10
        same_gradients(p)
        opt.step()
    opt.close()


# -- checkpoints ---------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_run_goes_on_with_the_same_bits(tmp_path, kind, dtype):
    model, opt = train(kind, steps=3, dtype=dtype)
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "file.pt")
    saved = torch.load(tmp_path / "file.pt", weights_only=True)
    again = build(dtype)
    opt_again = KINDS[kind][0](again.parameters(), lr=7.0, bucket_bytes=1)
    opt_again.load_state_dict(saved["opt"])
    again.load_state_dict(saved["model"])
    for step in range(3, 6):
        for m, o in ((model, opt), (again, opt_again)):
            loss_of(m, step).backward()
            o.step()
            o.zero_grad()
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert_same_bits(p, q)
        for name, value in opt.state[p].items():
            assert_same_bits(opt_again.state[q][name], value, name)
    opt.close()
    opt_again.close()


@each_kind
def test_checkpoints_go_both_ways_with_the_plain_one(kind):
    ours, theirs, hyper = KINDS[kind]
    p = randn(77)
    q, r = (nn.Parameter(p.detach().clone()) for _ in "12")
    plain, opt, back = theirs([p], **hyper), ours([q]), theirs([r])
    for _ in range(2):
        same_gradients(p)
        plain.step()
    with torch.no_grad():
        q.copy_(p)
    opt.load_state_dict(plain.state_dict())
    same_gradients(p, q)
    plain.step()
    opt.step()
    torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        r.copy_(q)
    back.load_state_dict(copy.deepcopy(opt.state_dict()))  # torch goes on with the tensors it is given
    same_gradients(p, q, r)
    for each in (plain, opt, back):
        each.step()
    torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(r, q, rtol=1e-6, atol=1e-7)
    opt.close()


def test_a_checkpoint_of_another_rule_is_refused():
    opts = {kind: KINDS[kind][0]([randn(5)], **KINDS[kind][2]) for kind in ("Adam", "Lion", "nesterov")}
    for opt in opts.values():
        same_gradients(opt.param_groups[0]["params"][0])
        opt.step()
    with pytest.raises(ValueError, match="the saved group 0 has no 'eps'"):
        opts["Adam"].load_state_dict(opts["Lion"].state_dict())
    with pytest.raises(ValueError, match="the saved group 0 has no 'momentum'"):
        opts["nesterov"].load_state_dict(opts["Adam"].state_dict())
    saved = opts["Lion"].state_dict()
    del saved["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="parameter 0 of group 0 has no 'exp_avg'"):
        opts["Lion"].load_state_dict(saved)
    for name, options in (("maximize", dict(maximize=True)), ("amsgrad", dict(amsgrad=True))):
        saved = torch.optim.Adam([randn(5)], **options).state_dict()
        with pytest.raises(ValueError, match=f"{name} is an option of torch's that is not offered here"):
            opts["Adam"].load_state_dict(saved)
    decay = dict(lr=1e-2, weight_decay=0.1)
    with pytest.raises(ValueError, match="decoupled_weight_decay=True is AdamW's decay"):
        opts["Adam"].load_state_dict(torch.optim.AdamW([randn(5)], **decay).state_dict())
    with pytest.raises(ValueError, match="parameter 0 of group 0 has 'exp_avg_sq', which is another optimizer's"):
        opts["Lion"].load_state_dict(opts["Adam"].state_dict())
    opts["Adam"].load_state_dict(torch.optim.AdamW([randn(5)], weight_decay=0.0).state_dict())
    for opt in opts.values():
        opt.close()


# -- momentum that comes and goes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("momenta", [(0.0, 0.9, 0.9), (0.9, 0.0, 0.9), (0.9, 0.0, 0.0, 0.5), (0.0, 0.0, 0.9, 0.9)])
def test_momentum_may_change_at_any_time(momenta):
    p = randn(500)
    q = nn.Parameter(p.detach().clone())
    opt, plain = (kind([x], lr=0.1, momentum=momenta[0], dampening=0.5) for kind, x in
                  ((zofftk.OffloadSGD, p), (torch.optim.SGD, q)))  # fmt: skip
    for momentum in momenta:
        for each in (opt, plain):
            each.param_groups[0]["momentum"] = momentum
        same_gradients(p, q)
        opt.step()
        plain.step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        assert ("momentum_buffer" in opt.state[p]) == (plain.state[q].get("momentum_buffer") is not None)
    opt.close()


def test_a_schedule_that_brings_momentum():
    p = randn(50)
    q = nn.Parameter(p.detach().clone())
    opt, plain = (kind([x], lr=0.1) for kind, x in ((zofftk.OffloadSGD, p), (torch.optim.SGD, q)))
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=10) for o in (opt, plain)]
    for _ in range(8):
        same_gradients(p, q)
        opt.step()
        plain.step()
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    opt.close()


def test_groups_with_and_without_momentum():
    params = [randn(40) for _ in range(2)]
    copies = [nn.Parameter(p.detach().clone()) for p in params]

    def groups(params):
        return [{"params": params[:1], "momentum": 0.9}, {"params": params[1:]}]

    opt, plain = zofftk.OffloadSGD(groups(params), lr=0.1), torch.optim.SGD(groups(copies), lr=0.1)
    for _ in range(3):
        for p, q in zip(params, copies, strict=True):
            same_gradients(p, q)
        opt.step()
        plain.step()
    torch.testing.assert_close(params, copies)
    assert [set(opt.state[p]) for p in params] == [{"step", "master", "momentum_buffer"}, {"step", "master"}]
    opt.close()


def test_a_deleted_state_starts_anew():
    p = randn(40)
    q = nn.Parameter(p.detach().clone())
    opt, plain = (kind([x], lr=0.1, momentum=0.9, dampening=0.5) for kind, x in
                  ((zofftk.OffloadSGD, p), (torch.optim.SGD, q)))  # fmt: skip
    for _ in range(3):
        same_gradients(p, q)
        opt.step()
        plain.step()
        del opt.state[p], plain.state[q]
    torch.testing.assert_close(p, q)
    opt.close()


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "hyper", "error", "message"),
    [
        ("SGD", {"momentum": -0.1}, ValueError, "momentum must be 0 or more, got -0.1"),
        ("SGD", {"lr": "fast"}, TypeError, "lr must be a number, got 'fast'"),
        ("SGD", {"dampening": None}, TypeError, "dampening must be a number, got None"),
        ("SGD", {"nesterov": True}, ValueError, "nesterov needs momentum above 0 and dampening 0"),
        ("nesterov", {"dampening": 0.1}, ValueError, "nesterov needs momentum above 0 and dampening 0"),
        ("SGD", {"maximize": True}, TypeError, "unknown option maximize"),
        ("Lion", {"betas": (0.9, 1.0)}, ValueError, "betas must be two numbers in"),
        ("Lion", {"weight_decay": -1.0}, ValueError, "weight_decay must be 0 or more, got -1.0"),
        ("Lion", {"eps": 1e-8}, TypeError, "unknown option eps"),
        ("Adam", {"eps": -1e-8}, ValueError, "eps must be 0 or more"),
    ],
)
def test_bad_arguments_are_named(kind, hyper, error, message):
    ours, _, usual = KINDS[kind]
    with pytest.raises(error, match=message):
        ours([randn(1)], **{**usual, **hyper})
    if "unknown" not in message:
        opt = ours([randn(1)], **usual)
        with pytest.raises(error, match=message):
            opt.add_param_group({"params": [randn(1)], **hyper})
        assert len(opt.param_groups) == 1
        opt.close()


@each_kind
def test_defaults_are_torchs(kind):
    ours, theirs, _ = KINDS[kind]
    opt, plain = ours([randn(1)]), theirs([randn(1)])
    assert isinstance(opt, OffloadOptimizer)
    for name in ours.rule.hyper_names:
        assert opt.param_groups[0][name] == plain.param_groups[0][name], name
    opt.close()
