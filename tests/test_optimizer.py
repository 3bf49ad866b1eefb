"""`OffloadAdamW` as a torch optimizer: what goes in, what it equals, what it refuses."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import zofftk
from tests.compare import assert_same_bits
from tests.small_gpt import build, loss_of
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def param(value, *shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.full(shape or (1,), value, dtype=dtype))


def put_grads(params, value=1.0):
    for p in params:
        p.grad = torch.full_like(p, value)


def ulps_of(value: torch.Tensor) -> torch.Tensor:
    """Distance to the next float of the same magnitude."""
    magnitude = value.abs().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.nextafter(magnitude, torch.tensor(float("inf"))) - magnitude


# -- what it equals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_each_step_is_torchs_within_two_ulps(dtype, kind):
    """From equal state and the same gradient: at most 2 ulp of the larger of |old value| and |term added|.

    torch's plain and foreach loops take the root of the second moment from a vector library that is off by one ulp
    in about one element of 150; there the bound is 4. Its fused loop takes the processor's root, as we do.
    """
    model = build(dtype)
    opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    params = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in params]
    torch_opt = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1, **kind)
    for step in range(12):
        loss_of(model, step).backward()
        before = []
        for p, master in zip(params, masters, strict=True):
            master.grad = opt.grad(p)
            if step:
                give_state(torch_opt.state[master], master, opt.state[p])
            before.append([master.detach().clone(), *moments(torch_opt.state[master], master)])
        opt.step()
        opt.zero_grad()
        torch_opt.step()
        for p, master, old in zip(params, masters, before, strict=True):
            ours = [opt.state[p]["master"], *moments(opt.state[p], p)]
            theirs = [master.detach(), *moments(torch_opt.state[master], master)]
            root = theirs[2].sqrt() == torch.from_numpy(np.sqrt(theirs[2].numpy()))
            bounds = [torch.where(root | torch.tensor("fused" in kind), 2.0, 4.0), 2.0, 2.0]
            for a, b, start, bound in zip(ours, theirs, old, bounds, strict=True):
                ulps = (a - b).abs() / torch.maximum(ulps_of(start), ulps_of(b - start))
                assert (ulps <= bound).all(), (ulps.max(), a.flatten()[ulps.argmax()], b.flatten()[ulps.argmax()])
            assert_same_bits(p.detach(), opt.state[p]["master"].to(dtype))
    opt.close()


def moments(state, like):
    zeros = torch.zeros_like(like, dtype=torch.float32)
    return [state[name].detach().clone() if state else zeros for name in ("exp_avg", "exp_avg_sq")]


def give_state(torch_state, master, state):
    with torch.no_grad():
        master.copy_(state["master"])
    for name in ("exp_avg", "exp_avg_sq"):
        torch_state[name].copy_(state[name])


@pytest.mark.parametrize(("dtype", "expected"), list(zip(DTYPES, [0.9, 0.8984375, 0.89990234375], strict=True)))
def test_b70_no_element_is_left_out(dtype, expected):
    shapes = [(n,) for n in [*range(1, 68), 127, 128, 129, 255, 1023, 1025, 4097]] + [(65, 1), (1, 65), (3, 65)]
    params = [param(1.0, *shape, dtype=dtype) for shape in shapes]
    opt = zofftk.OffloadAdamW(params, lr=0.1, weight_decay=0.0, bucket_bytes=1)
    put_grads(params)
    opt.step()
    for p in params:
        assert (p == params[0][0]).all(), p.shape
    assert params[0].item() == pytest.approx(expected, rel=1e-7)
    opt.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_b77_half_vectors(dtype):
    params = [torch.nn.Parameter(torch.randn(*shape).to(dtype)) for shape in [(1024,), (1,), (8,), (256, 256)]]
    opt = zofftk.OffloadAdamW(params, lr=0.01)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        opt.step()
    for p in params:
        assert_same_bits(p.detach(), opt.state[p]["master"].to(dtype))
        assert opt.state[p]["step"] == 3
    opt.close()


def test_b78_empty_parameters():
    for layers in ([4, 0], [0, 4], [0]):
        params = [torch.nn.Parameter(torch.ones(n, 4)) for n in layers]
        opt = zofftk.OffloadAdamW(params, lr=0.1, weight_decay=0.0)
        for _ in range(2):
            sum(p.sum() for p in params).backward()
            opt.step()
            opt.zero_grad()
        assert [p.shape for p in params] == [(n, 4) for n in layers]
        assert all(torch.allclose(p, torch.tensor(0.8)) for p in params)
        saved = opt.state_dict()
        opt.load_state_dict(saved)
        opt.close()


def test_b46_views_at_odd_addresses():
    for n in (33, 1000):
        base = torch.ones(n + 1)
        p = torch.nn.Parameter(base[1:])
        assert p.data_ptr() % 64 != 0
        opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0)
        p.grad = torch.ones(n + 1)[1:]
        opt.step()
        assert torch.allclose(p, torch.tensor(0.9))
        assert base[0] == 1.0
        opt.close()


def test_b84_eps_comes_after_the_correction():
    p = param(0.0)
    opt = zofftk.OffloadAdamW([p], lr=1e-3, eps=1e-8, weight_decay=0.0)
    put_grads([p], 1e-8)
    opt.step()
    assert p.item() == pytest.approx(-5.0e-4, rel=1e-4)
    opt.close()


def test_b30_decay_is_decoupled_and_comes_first():
    for value, grad, decay, expected in [(1.0, 0.0, 0.1, 0.99), (2.0, 1.0, 0.5, 1.8)]:
        p = param(value)
        opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=decay)
        put_grads([p], grad)
        opt.step()
        assert p.item() == pytest.approx(expected, rel=1e-6)
        opt.close()


def test_b66_subnormal_fp16_gradients_count():
    p = param(1.0, dtype=torch.float16)
    opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0)
    put_grads([p], 2.0**-24)
    opt.step()
    assert opt.state[p]["master"].item() == pytest.approx(0.9143669, rel=1e-6)
    assert opt.state[p]["exp_avg"].item() == pytest.approx(5.9605e-9, rel=1e-4)
    opt.close()


def test_b55_equal_tensors_in_different_buckets_stay_equal():
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 5000)) for _ in range(3)]
    opt = zofftk.OffloadAdamW(params, lr=0.01, bucket_bytes=1)
    for step in range(13):
        if step == 10:
            opt.param_groups[0]["betas"] = (0.8, 0.99)
        grad = torch.randn(5000)
        for p in params:
            p.grad = grad.clone()
        opt.step()
        assert_same_bits(params[1], params[0])
        assert_same_bits(params[2], params[0])
    saved = opt.state_dict()
    for state in saved["state"].values():
        state["step"] = torch.tensor(20.0)
    opt.load_state_dict(saved)
    put_grads(params)
    opt.step()
    assert_same_bits(params[1], params[0])
    assert opt.state[params[0]]["step"] == 21
    opt.close()


def test_b31_narrowing_keeps_nan_and_ties_to_even():
    bits = torch.tensor([0x7F800001, 0x7FFF8C22, 0x3E89CCD5], dtype=torch.int32).view(torch.float32)
    values = torch.cat([bits, torch.tensor([float("inf"), float("-inf"), 1 + 2**-8, 1 + 3 * 2**-8, -0.0])])
    p = torch.nn.Parameter(torch.zeros(values.numel(), dtype=torch.bfloat16))
    opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0)
    put_grads([p], 0.0)
    opt.step()
    opt.state[p]["master"].copy_(values)
    put_grads([p], 0.0)
    opt.step()
    expected = torch.tensor([float("nan"), float("nan"), 0.26953125, float("inf"), float("-inf"), 1.0, 1.015625, -0.0])
    assert_same_bits(p.detach(), expected.to(torch.bfloat16))
    opt.close()


def test_b41_a_parameter_larger_than_a_bucket():
    n = 4096 * 3 + 5
    p, q = torch.nn.Parameter(torch.randn(n)), None
    q = torch.nn.Parameter(p.detach().clone())
    opt, whole = (zofftk.OffloadAdamW([x], lr=0.1, bucket_bytes=size) for x, size in ((p, 1), (q, 1 << 24)))
    for _ in range(3):
        p.grad = torch.randn(n)
        q.grad = p.grad.clone()
        opt.step()
        whole.step()
    assert_same_bits(p, q)
    assert len(opt._engine.buckets) == 4
    opt.close()
    whole.close()


def test_channels_last_and_other_strides():
    def run(layout):
        torch.manual_seed(5)
        p = torch.nn.Parameter(layout(torch.randn(8, 3, 5, 5)))
        opt = zofftk.OffloadAdamW([p], lr=0.1, bucket_bytes=1)
        for _ in range(3):
            (p * torch.randn(8, 3, 5, 5)).sum().backward()
            opt.step()
            opt.zero_grad()
        opt.close()
        return p

    plain = run(lambda t: t)
    for layout in (
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ):
        p = run(layout)
        assert not p.is_contiguous()
        assert_same_bits(p.detach().contiguous(), plain.detach())


def test_wire_dtype_narrows_what_fp32_parameters_send():
    p = torch.nn.Parameter(torch.randn(5000))
    opt = zofftk.OffloadAdamW([p], lr=0.1, wire_dtype=torch.bfloat16)
    p.grad = torch.randn(5000)
    opt.step()
    assert opt.report().bytes_up == 2 * 5000
    assert_same_bits(p.detach(), opt.state[p]["master"].bfloat16().float())
    opt.close()


# -- groups, schedulers, names -------------------------------------------------------------------------------------


def test_b73_schedulers_and_lr_changes():
    p = param(1.0)
    opt = zofftk.OffloadAdamW([p], lr=1e-2, weight_decay=0.0)
    assert isinstance(opt, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: [1.0, 0.1, 0.0][min(step, 2)])
    for expected in (0.99, 0.989, 0.989):
        put_grads([p])
        opt.step()
        schedule.step()
        assert p.item() == pytest.approx(expected, rel=1e-6)
    assert opt.state[p]["step"] == 3
    opt.close()


def test_b32_groups_keep_their_own_settings():
    params = [param(1.0) for _ in range(3)]
    groups = [
        {"params": [params[0]], "lr": 0.1, "weight_decay": 0.1, "name": "decay"},
        {"params": [params[1]], "lr": 0.1, "weight_decay": 0.0},
        {"params": [params[2]], "lr": 0.01, "weight_decay": 0.0, "betas": (0.0, 0.999)},
    ]
    opt = zofftk.OffloadAdamW(groups)
    put_grads(params, 0.0)
    opt.step()
    assert [p.item() for p in params] == [pytest.approx(0.99), 1.0, 1.0]
    put_grads(params, 1.0)
    opt.step()
    reference = [param(1.0) for _ in range(3)]
    torch_opt = torch.optim.AdamW([{**g, "params": [p]} for g, p in zip(groups, reference, strict=True)])
    for grad in (0.0, 1.0):
        put_grads(reference, grad)
        torch_opt.step()
    for p, q in zip(params, reference, strict=True):
        assert p.item() == pytest.approx(q.item(), rel=1e-6)
    assert opt.param_groups[0]["name"] == "decay"
    opt.close()


def test_b58_unfreezing_and_new_groups():
    a, b, c = param(1.0), param(1.0), param(1.0)
    b.requires_grad_(False)
    opt = zofftk.OffloadAdamW([a, b], lr=0.1, weight_decay=0.0)
    for _ in range(2):
        a.sum().backward()
        opt.step()
        opt.zero_grad()
    assert b.item() == 1.0
    b.requires_grad_(True)
    opt.add_param_group({"params": [c], "lr": 1.0})
    for _ in range(2):
        (a + b + c).sum().backward()
        opt.step()
        opt.zero_grad()
    assert [opt.state[p]["step"].item() for p in (a, b, c)] == [4, 2, 2]
    assert [p.item() for p in (a, b, c)] == pytest.approx([0.6, 0.8, -1.0], rel=1e-5)
    opt.close()


def test_b38_frozen_parameters_cost_nothing():
    frozen, trained = torch.nn.Parameter(torch.ones(100_000), requires_grad=False), param(1.0, 64)
    opt = zofftk.OffloadAdamW([frozen, trained])
    assert opt.report().host_bytes < 2000
    trained.sum().backward()
    opt.step()
    assert_same_bits(frozen.detach(), torch.ones(100_000))
    opt.close()


def test_b29_tied_weights_count_once():
    weight = param(1.0, 4, 4)
    opt = zofftk.OffloadAdamW([weight], lr=0.1, max_grad_norm=100.0)
    (weight * 0.5).sum().backward()
    opt.zero_grad()
    ((weight * 0.5).sum() + (weight * 0.5).sum()).backward()
    opt.step()
    assert opt.last_grad_norm == 4.0
    opt.close()


def test_b17_a_layer_used_three_times_under_checkpointing():
    from torch.utils.checkpoint import checkpoint

    def run(reentrant):
        torch.manual_seed(3)
        layer = torch.nn.Linear(8, 8)
        opt = zofftk.OffloadAdamW(layer.parameters(), lr=0.1, weight_decay=0.0)
        x = torch.randn(2, 8, requires_grad=True)
        for _ in range(3):
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()
        opt.step()
        states = [opt.state[p] for p in layer.parameters()]
        opt.close()
        return states

    plain = run(None)
    for reentrant in (True, False):
        for state, expected in zip(run(reentrant), plain, strict=True):
            assert state["step"] == 1
            assert torch.allclose(state["exp_avg"], expected["exp_avg"], rtol=1e-6)


def test_b54_a_step_that_is_not_finite_changes_nothing():
    p = param(1.0, 2, dtype=torch.bfloat16)
    opt = zofftk.OffloadAdamW([p], lr=0.1)
    p.grad = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    with pytest.warns(
        RuntimeWarning,
        match="a step was skipped: the norm is nan, the gradient of parameter 0 of group 0 is not finite",
    ):
        opt.step()
    assert (opt.skipped_steps, opt.last_step_skipped) == (1, True)
    assert not opt.state
    assert_same_bits(p.detach(), torch.ones(2, dtype=torch.bfloat16))
    put_grads([p])
    opt.step()
    assert (opt.skipped_steps, opt.last_step_skipped, opt.state[p]["step"]) == (1, False, 1)
    opt.close()


def test_closures():
    p = param(1.0)
    opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0)

    def closure():
        opt.zero_grad()
        loss = (p * 2).sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 2.0
    assert p.item() == pytest.approx(0.9)
    opt.close()


def test_b07_weights_loaded_after_construction_are_picked_up():
    for dtype in DTYPES:
        model = torch.nn.Linear(1, 1, bias=False).to(dtype)
        opt = zofftk.OffloadAdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        model.load_state_dict({"weight": torch.full((1, 1), 5.0)})
        put_grads(model.parameters())
        opt.step()
        assert opt.state[model.weight]["master"].item() == pytest.approx(4.9)
        with torch.no_grad():
            model.weight.data.fill_(7.0)
        opt.refresh()
        assert opt.state[model.weight]["master"].item() == 7.0
        opt.close()


def test_weights_written_before_a_save_are_in_the_saved_masters():
    p = param(1.0, 2, dtype=torch.bfloat16)
    opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0)
    put_grads([p])
    opt.step()
    with torch.no_grad():
        p.fill_(5.0)
    saved = opt.state_dict()
    opt.close()
    again = zofftk.OffloadAdamW([p])
    again.load_state_dict(saved)
    put_grads([p])
    again.step()
    assert again.state[p]["master"].tolist() == pytest.approx([4.9, 4.9])
    again.close()


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_b14_b81_states_survive_a_file_bit_for_bit(tmp_path, dtype):
    def steps(model, opt, numbers):
        for step in numbers:
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()

    model = build(dtype)
    opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-2)
    steps(model, opt, range(3))
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "file.pt")
    saved = torch.load(tmp_path / "file.pt", weights_only=True)
    again = build(dtype)
    opt_again = zofftk.OffloadAdamW(again.parameters(), lr=7.0, bucket_bytes=1)
    opt_again.load_state_dict(saved["opt"])
    again.load_state_dict(saved["model"])  # in this order: the loaded masters must stand
    assert opt_again.param_groups[0]["lr"] == 1e-2
    steps(model, opt, range(3, 5))
    steps(again, opt_again, range(3, 5))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert_same_bits(p, q)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert_same_bits(opt.state[p][name], opt_again.state[q][name], name)
        assert opt.state[p]["step"] == opt_again.state[q]["step"] == 5
    opt.close()
    opt_again.close()


def test_a_torch_checkpoint_continues():
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 77)) for _ in range(2))
    torch_opt = torch.optim.AdamW([p], lr=0.1)
    opt = zofftk.OffloadAdamW([q])
    put_grads([p])
    torch_opt.step()
    with torch.no_grad():
        q.copy_(p)
    opt.load_state_dict(torch_opt.state_dict())
    for x, o in ((p, torch_opt), (q, opt)):
        put_grads([x], 0.5)
        o.step()
    assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)
    assert opt.state[q]["step"] == 2
    opt.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda sd: sd.pop("state"), "'state' and 'param_groups'"),
        (lambda sd: sd["param_groups"][0].update(params=[0]), r"the saved groups hold \[1\] parameters"),
        (lambda sd: sd["state"][1].pop("exp_avg"), "of parameter 1 of group 0 has no 'exp_avg'"),
        (lambda sd: sd["state"][1].update(master=torch.zeros(5)), r"has shape \(5,\), expected \(3,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(damage, message):
    params = [param(1.0, 2), param(1.0, 3)]
    opt = zofftk.OffloadAdamW(params, lr=0.1)
    put_grads(params)
    opt.step()
    before = [opt.state[p]["master"].clone() for p in params]
    saved = {
        "state": {k: dict(v) for k, v in opt.state_dict()["state"].items()},
        "param_groups": opt.state_dict()["param_groups"],
    }
    saved["state"][0]["master"] = torch.full((2,), 9.0)
    damage(saved)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)
    for p, master in zip(params, before, strict=True):
        assert_same_bits(opt.state[p]["master"], master)
    opt.close()


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda: {"params": []}, ValueError, "empty parameter list"),
        (lambda: {"params": [param(1.0)], "amsgrad": True}, TypeError, "unknown option amsgrad: expected one of"),
        (lambda: {"params": [param(1.0)], "lr": -1.0}, ValueError, "lr must be 0 or more, got -1.0"),
        (lambda: {"params": [param(1.0)], "lr": float("nan")}, ValueError, "lr must be 0 or more, got nan"),
        (lambda: {"params": [param(1.0)], "betas": (0.9, 1.0)}, ValueError, "betas must be two numbers in"),
        (lambda: {"params": [param(1.0)], "eps": -1e-8}, ValueError, "eps must be 0 or more"),
        (lambda: {"params": [param(1.0)], "weight_decay": -0.1}, ValueError, "weight_decay must be 0 or more"),
        (lambda: {"params": [param(1.0)], "max_grad_norm": 0}, ValueError, "max_grad_norm must be a positive"),
        (lambda: {"params": [{"params": [param(1.0)], "lr": -1}]}, ValueError, "lr must be 0 or more, got -1"),
        (
            lambda: {"params": [("a", param(1.0)), ("b", param(1 + 1j, dtype=torch.complex64))]},
            TypeError,
            "'b' is torch.complex64, expected one of torch.float32, torch.bfloat16, torch.float16",
        ),
        (lambda: {"params": [param(1.0, dtype=torch.float64)]}, TypeError, "parameter 0 of group 0 is torch.float64"),
        (
            lambda: {"params": [torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)]},
            TypeError,
            "torch.int32",
        ),
        (
            lambda: {"params": [torch.nn.Parameter(torch.zeros(3, device="meta"))]},
            ValueError,
            "on the meta device, expected a tensor with data",
        ),
        (lambda: {"params": [param(1.0)], "config": {"max_grad_norm": 1.0}}, TypeError, "must be an OffloadConfig"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        zofftk.OffloadAdamW(**arguments())


def test_a_refused_group_is_not_added():
    opt = zofftk.OffloadAdamW([param(1.0)])
    with pytest.raises(TypeError, match="parameter 0 of group 1 is torch.complex64"):
        opt.add_param_group({"params": [param(1j, dtype=torch.complex64)]})
    assert len(opt.param_groups) == 1
    opt.close()


def test_sparse_gradients_name_the_parameter_and_nothing_is_lost():
    embedding, layer = torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 1)
    named = [("embedding", embedding.weight), *layer.named_parameters()]
    opt = zofftk.OffloadAdamW(named, lr=0.1)
    with pytest.raises(
        TypeError, match=r"gradient of 'embedding' is torch.sparse_coo, expected a dense one.*sparse=False"
    ):
        layer(embedding(torch.tensor([1, 2]))).sum().backward()
    opt.zero_grad()
    layer(torch.ones(1, 4)).sum().backward()
    opt.step()
    assert opt.state[layer.weight]["step"] == 1
    assert embedding.weight not in opt.state
    embedding.weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (10, 4), check_invariants=True)
    with pytest.raises(TypeError, match="'embedding' is torch.sparse_coo"):
        opt.step()
    opt.close()


# -- life ----------------------------------------------------------------------------------------------------------


def test_close_leaves_plain_parameters_and_readable_states():
    p = param(1.0, 3)
    opt = zofftk.OffloadAdamW([p], lr=0.1)
    p.sum().backward()
    opt.step()
    opt.close()
    opt.close()
    assert p.grad is None
    assert opt.state[p]["exp_avg"].tolist() == pytest.approx([0.1] * 3)
    assert opt.state_dict()["state"][0]["step"] == 1
    p.sum().backward()
    assert type(p.grad) is torch.Tensor
    with pytest.raises(RuntimeError, match="closed"):
        opt.step()


def test_close_with_an_fp32_gradient_in_the_grad_of_an_fp16_parameter():
    p = param(1.0, 3, dtype=torch.float16)
    opt = zofftk.OffloadAdamW([p], lr=0.1)
    p.grad = torch.ones(3)
    opt.close()
    assert p.grad.dtype == torch.float32


def test_a_forgotten_optimizer_is_freed_with_its_parameters():
    p = param(1.0, 100)
    opt = zofftk.OffloadAdamW([p])
    p.sum().backward()
    opt.step()
    references = [weakref.ref(p), weakref.ref(opt), weakref.ref(opt._engine)]
    del p, opt
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_a_surviving_parameter_trains_on_without_it():
    p = param(1.0, 100)
    opt = zofftk.OffloadAdamW([p])
    del opt
    gc.collect()
    p.sum().backward()
    assert type(p.grad) is torch.Tensor


def test_b23_the_optimizer_in_a_forked_child_says_so(no_threads_left):
    import os

    p = param(1.0, 1000)
    opt = zofftk.OffloadAdamW([p], lr=0.1)
    p.sum().backward()
    opt.step()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            put_grads([p])
            opt.step()
        except RuntimeError as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"fork" in os.read(read_end, 1000)
    opt.zero_grad()
    p.sum().backward()
    opt.step()
    assert opt.state[p]["step"] == 2
    opt.close()


def test_a_fault_in_a_worker_reaches_the_training_thread():
    class Breaks(EmulatedDevice):
        def _host_task(self, label, task):
            def fail():
                raise MemoryError("no room for " + label)

            super()._host_task(label, fail if label.startswith("adam") else task)

    p = param(1.0)
    opt = zofftk.OffloadAdamW([p], device=Breaks())
    p.sum().backward()
    with pytest.raises(MemoryError, match="no room for adam: bucket 0"):
        opt.step()
    opt.close()
