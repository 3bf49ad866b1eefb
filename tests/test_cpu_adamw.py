"""CPUAdamW against torch.optim.AdamW: numbers, layouts, state dicts, refusals."""

import copy
import io
import itertools

import pytest
import torch

from tests.compare import assert_same_bits, assert_within_ulp
from zofftk.cpu_adamw import CPUAdamW

HALVES = [torch.bfloat16, torch.float16]


def parameter(*shape, dtype=torch.float32, seed=0):
    data = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return torch.nn.Parameter(data)


def gradient(like, seed):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def pair(make, steps=3, **options):
    """The same parameters stepped by both optimizers."""
    ours, theirs = make(), make()
    mine, torchs = CPUAdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
    for step in range(steps):
        for optimizer, params in ((mine, ours), (torchs, theirs)):
            for index, p in enumerate(params):
                p.grad = gradient(p, 100 * step + index)
            optimizer.step()
    return mine, ours, torchs, theirs


def assert_close(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        assert_within_ulp(p.detach(), q.detach(), torch.maximum(q.detach().abs(), torch.tensor(0.1)), 8, "p")


@pytest.mark.parametrize(
    "options", [{}, dict(lr=torch.tensor(1e-2)), dict(maximize=True, weight_decay=0.0), dict(betas=(0.5, 0.9))]
)
def test_like_torch(options):
    def make():
        return [parameter(3, 5), parameter(1037), parameter(), parameter(0), parameter(4, 0)]

    mine, ours, torchs, theirs = pair(make, **options)
    assert_close(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        assert p.shape == q.shape
        assert set(mine.state[p]) == set(torchs.state[q])
        assert mine.state[p]["step"].item() == 3
        assert mine.state[p]["step"].dtype == torch.float32
        for name in ("exp_avg", "exp_avg_sq"):
            assert_within_ulp(mine.state[p][name], torchs.state[q][name], torchs.state[q][name].abs() + 1e-3, 4, name)


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "strided", "grad_transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_non_contiguous_parameters_are_updated(layout, dtype):
    def make(strange):
        base = parameter(4, 6, 3, 2, dtype=dtype).detach()
        if strange and layout == "transposed":
            base = base.transpose(0, 1).contiguous().transpose(0, 1)
        elif strange and layout == "channels_last":
            base = base.contiguous(memory_format=torch.channels_last)
        elif strange and layout == "strided":
            base = torch.stack([base, torch.full_like(base, 7)], dim=-1)[..., 0]
        return torch.nn.Parameter(base)

    strange, plain = make(True), make(False)
    optimizers = CPUAdamW([strange], lr=1e-2), CPUAdamW([plain], lr=1e-2)
    for step in range(3):
        plain.grad = gradient(plain, step)
        strange.grad = plain.grad.clone()
        if layout == "grad_transposed":
            strange.grad = plain.grad.transpose(0, 3).contiguous().transpose(0, 3)
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(plain, make(False))
    assert_same_bits(strange.detach(), plain.detach(), layout)
    if layout == "strided":
        assert torch.all(strange.detach().as_strided((144,), (2,), 1) == 7)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(1024,), (1,), (8,), (1024, 1024), (33, 1), (1, 17), ()])
def test_b77_half_parameters_equal_their_master(shape, dtype):
    p = parameter(*shape, dtype=dtype)
    reference = torch.nn.Parameter(p.detach().float())
    mine, torchs = CPUAdamW([p], lr=1e-2), torch.optim.AdamW([reference], lr=1e-2, foreach=False)
    for step in range(3):
        p.grad = gradient(p, step)
        reference.grad = p.grad.float()
        mine.step()
        torchs.step()
    master = mine.state[p]["master"]
    assert_same_bits(p.detach(), master.to(dtype))
    assert_close([master], [reference])
    assert {x.dtype for x in mine.state[p].values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_b70_shapes(dtype):
    expected = torch.tensor(0.9).to(dtype).item()
    for n, build in itertools.product((1, 7, 16, 33, 128, 1025), ((1,), (1, 1), (1, 0), (3, 0))):
        shape = (n,) if build == (1,) else (n, 1) if build == (1, 1) else (build[0], n)
        p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        p.grad = torch.ones_like(p)
        CPUAdamW([p], lr=0.1, weight_decay=0.0).step()
        assert torch.all(p == p.flatten()[0])
        assert p.flatten()[0].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("order", ["last", "first", "alone"])
def test_b78_zero_element_parameters(order):
    full, empty = torch.nn.Linear(4, 4), torch.nn.Linear(4, 0, bias=False)
    groups = {"last": [full, empty], "first": [empty, full], "alone": [full]}[order]
    params = [p for module in groups for p in module.parameters()]
    optimizer = CPUAdamW(params if order != "alone" else [{"params": params}, {"params": list(empty.parameters())}])
    for _ in range(2):
        (full(torch.ones(2, 4)).sum() + empty(torch.ones(2, 4)).sum()).backward()
        optimizer.step()
    assert empty.weight.shape == (0, 4)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert optimizer.state[empty.weight]["step"].item() == 3


def test_state_dict_goes_both_ways():
    def make():
        return [parameter(5, 7), parameter(33)]

    mine, ours, torchs, theirs = pair(make)
    crossed_mine, crossed_torch = CPUAdamW(theirs), torch.optim.AdamW(ours, foreach=False)
    buffer = io.BytesIO()
    torch.save(mine.state_dict(), buffer)
    buffer.seek(0)
    crossed_torch.load_state_dict(torch.load(buffer, weights_only=True))
    crossed_mine.load_state_dict(torchs.state_dict())
    for optimizer, params in ((crossed_torch, ours), (crossed_mine, theirs)):
        for index, p in enumerate(params):
            p.grad = gradient(p, 500 + index)
        optimizer.step()
    assert_close(ours, theirs)
    assert crossed_torch.state[ours[0]]["step"].item() == crossed_mine.state[theirs[0]]["step"].item() == 4


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_loading_keeps_float32_state(dtype):
    p = parameter(65, dtype=dtype)
    optimizer = CPUAdamW([p], lr=1e-2)
    for step in range(2):
        p.grad = gradient(p, step)
        optimizer.step()
    twin = torch.nn.Parameter(p.detach().clone())
    other = CPUAdamW([twin], lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq", "master"):
        assert_same_bits(other.state[twin][name], optimizer.state[p][name], name)
        assert other.state[twin][name].data_ptr() != optimizer.state[p][name].data_ptr()
    p.grad = twin.grad = gradient(p, 7)
    optimizer.step()
    other.step()
    assert_same_bits(twin.detach(), p.detach())


@pytest.mark.parametrize(
    "step", [3, 3.0, torch.tensor(3, dtype=torch.bfloat16), torch.tensor(3), torch.tensor(3.0)], ids=repr
)
def test_loading_accepts_any_kind_of_step(step):
    p = parameter(9)
    optimizer = CPUAdamW([p])
    p.grad = gradient(p, 1)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = step
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["step"].dtype == torch.float32
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 4


def test_b55_step_counter_jumps():
    ours, theirs = [parameter(33)], [parameter(33)]
    mine, torchs = CPUAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, foreach=False)
    for step in range(6):
        for optimizer, (p,) in ((mine, ours), (torchs, theirs)):
            p.grad = gradient(p, step)
            optimizer.step()
            if step == 3:
                optimizer.param_groups[0]["betas"] = (0.8, 0.99)
                saved = optimizer.state_dict()
                saved["state"][0]["step"] = torch.tensor(20.0)
                optimizer.load_state_dict(saved)
        assert_close(ours, theirs)


def test_closure_and_missing_gradients():
    p, idle = parameter(3), parameter(3)
    optimizer = CPUAdamW([p, idle])

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    before = idle.detach().clone()
    assert optimizer.step(closure).item() > 0
    assert torch.equal(idle, before)
    assert idle not in optimizer.state


def complex_parameter():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    return p


def meta_parameter():
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones_like(p)
    return p


def sparse_gradient():
    p = parameter(3)
    p.grad = torch.ones(3).to_sparse()
    return p


def expanded_parameter():
    p = torch.ones(1).expand(3).requires_grad_()
    p.grad = torch.ones(3)
    return p


def double_parameter():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    return p


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (complex_parameter, "^bad: expected float32, bfloat16 or float16, got torch.complex64"),
        (double_parameter, "^bad: expected float32, bfloat16 or float16, got torch.float64"),
        (meta_parameter, "^bad: expected a tensor on device cpu, got device meta"),
        (sparse_gradient, "^gradient of bad: expected a dense tensor"),
        (expanded_parameter, "^bad: expected elements of its own"),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_b46_refusals_name_the_parameter_and_change_nothing(make, message):
    good, bad = parameter(3), make()
    optimizer = CPUAdamW([("good", good), ("bad", bad)])
    good.grad = gradient(good, 1)
    before = good.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(good, before)
    assert not optimizer.state


@pytest.mark.parametrize(
    "options",
    [dict(amsgrad=True), dict(capturable=True), dict(differentiable=True), dict(lr=-1.0), dict(betas=(1.0, 0.9)),
     dict(eps=-1.0), dict(weight_decay=-1.0), dict(threads=0), dict(threads=2**31), dict(betas=(0.9,))],
)  # fmt: skip
def test_unsupported_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CPUAdamW([parameter(3)], **options)


def test_loading_amsgrad_state_is_refused():
    p = parameter(3)
    theirs = torch.optim.AdamW([p], amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad: CPUAdamW supports False only"):
        CPUAdamW([p]).load_state_dict(theirs.state_dict())


def stepped(*params):
    optimizer = CPUAdamW(list(params), lr=1e-2)
    for index, p in enumerate(params):
        p.grad = gradient(p, index)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(exp_avg=torch.zeros(4)), ValueError, r"state of parameter 1: exp_avg: expected shape \(3,\), got \(4,\)"),
        (dict(exp_avg=[0.0] * 3), TypeError, "parameter 1: exp_avg: expected a tensor, got list"),
        (
            dict(exp_avg_sq=torch.zeros(3, dtype=torch.complex64)),
            ValueError,
            "exp_avg_sq: expected dense floating",
        ),
        (dict(exp_avg_sq=torch.zeros(3, device="meta")), ValueError, "exp_avg_sq: expected dense .* on meta"),
        (dict(exp_avg_sq=torch.zeros(3).to_sparse()), ValueError, "exp_avg_sq: expected dense"),
        (dict(step=float("nan")), ValueError, "parameter 1: step: expected a whole number of 0 or more, got nan"),
        (dict(step=-1), ValueError, "step: expected a whole number of 0 or more, got -1"),
        (dict(step=1.5), ValueError, "step: expected a whole number"),
        (dict(step="3"), TypeError, "step: expected a number, got '3'"),
        (dict(step=torch.ones(2)), TypeError, "step: expected a number"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, error, message):
    optimizer = stepped(parameter(3, seed=1), parameter(3, seed=2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    saved["state"][0]["exp_avg"].fill_(7)
    saved["state"][1].update(change)
    assert_refused(optimizer, saved, error, message)


def assert_refused(optimizer, saved, error, message):
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(after["state"][index][name], value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda saved: saved["param_groups"][0].update(lr="x"), TypeError, "lr: expected a number, got 'x'"),
        (lambda saved: saved["param_groups"][0].update(betas=(0.9,)), ValueError, "betas: expected two numbers"),
        (lambda saved: saved["param_groups"][0].pop("lr"), ValueError, "group 0 of the state dict: expected lr"),
        (lambda saved: saved["param_groups"][0].pop("params"), ValueError, "group 0 .* expected params"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), ValueError, "loaded state dict"),
        (lambda saved: saved["param_groups"].clear(), ValueError, "loaded state dict"),
        (lambda saved: saved.pop("state"), TypeError, "state: expected one in a state dict"),
        (lambda saved: saved["state"].update({1: 3}), TypeError, "state of parameter 1: expected a dict, got int"),
        (lambda saved: saved["state"][1].pop("step"), ValueError, "state of parameter 1: expected step"),
        (lambda saved: saved["state"][1].pop("exp_avg"), ValueError, "state of parameter 1: expected exp_avg"),
    ],
)
def test_a_state_dict_of_another_make_changes_nothing(change, error, message):
    optimizer = stepped(parameter(3, seed=1), parameter(3, seed=2))
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    assert_refused(optimizer, saved, error, message)


def test_parameters_on_the_same_memory_are_refused_by_name():
    base = torch.zeros(20)
    first, second = torch.nn.Parameter(base[:12]), torch.nn.Parameter(base[8:])
    optimizer = CPUAdamW([("first", first), ("second", second)])
    first.grad = torch.ones(12)
    with pytest.raises(ValueError, match="first and second: expected memory of their own"):
        optimizer.step()
    assert not base.any()


def test_a_gradient_on_a_parameter_s_memory_is_refused_by_name():
    first, second = parameter(3, seed=1), parameter(3, seed=2)
    optimizer = CPUAdamW([("first", first), ("second", second)])
    first.grad, second.grad = torch.ones(3), first.detach()
    before = first.detach().clone()
    with pytest.raises(ValueError, match="first and gradient of second: expected memory of their own"):
        optimizer.step()
    assert torch.equal(first, before)
    second.grad = first.grad  # read by both
    optimizer.step()


def test_parameters_side_by_side_in_one_storage_are_updated():
    base = torch.zeros(3, 4)
    left, right, column = (torch.nn.Parameter(part) for part in (base[:, 0], base[:, 2:], base[:, 1]))
    stepped(left, right, column)
    assert base.all()


def test_a_parameter_whose_elements_overlap_is_refused():
    bad = torch.zeros(8).as_strided((3, 3), (2, 1)).requires_grad_()
    good = parameter(3)
    bad.grad, good.grad = torch.ones(3, 3), torch.ones(3)
    before = good.detach().clone()
    with pytest.raises(ValueError, match="^bad: expected elements of its own"):
        CPUAdamW([("good", good), ("bad", bad)]).step()
    assert torch.equal(good, before)
    interleaved = torch.zeros(20).as_strided((3, 2), (2, 3)).requires_grad_()
    interleaved.grad = torch.ones(3, 2)
    CPUAdamW([interleaved]).step()
    assert interleaved.all()


def test_lazily_negated_gradients_count_with_their_sign():
    lazy, plain = parameter(5), parameter(5)
    plain.grad = gradient(plain, 3)
    lazy.grad = torch._neg_view(-plain.grad)  # contiguous; views of conjugates are lazily negated the same way
    assert lazy.grad.is_neg()
    for p in (lazy, plain):
        CPUAdamW([p], lr=1e-2).step()
    assert_same_bits(lazy.detach(), plain.detach())


def test_a_freed_gradient_is_refused_before_anything_changes():
    good, bad = parameter(3), parameter(3)
    good.grad, bad.grad = torch.ones(3), torch.ones(3)
    bad.grad.untyped_storage().resize_(0)
    before = good.detach().clone()
    with pytest.raises(ValueError, match="gradient of bad: expected values, its storage has been freed"):
        CPUAdamW([("good", good), ("bad", bad)]).step()
    assert torch.equal(good, before)


def test_copies_keep_working():
    p = parameter(9)
    optimizer = CPUAdamW([p], threads=1)
    p.grad = gradient(p, 1)
    optimizer.step()
    clone = copy.deepcopy(optimizer)
    clone.param_groups[0]["params"][0].grad = gradient(p, 2)
    clone.step()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
