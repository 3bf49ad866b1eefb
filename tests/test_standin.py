"""The stand-in answers what loops ask of gradients, and refuses the rest with a sentence."""

from __future__ import annotations

import pickle

import pytest
import torch

import zofftk
from tests.compare import assert_same_bits
from tests.small_gpt import build, loss_of
from zofftk.standin import StandIn, StandInError

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture
def three_and_four():
    """Two parameters whose gradients are 3 and 4, after a backward, and their optimizer."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    opt = zofftk.OffloadAdamW(params, lr=0.1, weight_decay=0.0)
    (params[0] * 3 + params[1] * 4).sum().backward()
    yield params, opt
    opt.close()


def exp_avgs(params, opt):
    opt.step()
    return [opt.state[p]["exp_avg"].item() for p in params]


def test_it_has_the_gradients_shape_dtype_and_device():
    p = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16))
    opt = zofftk.OffloadAdamW([("layer.weight", p)])
    p.sum().backward()
    assert isinstance(p.grad, StandIn)
    assert (p.grad.shape, p.grad.dtype, p.grad.device) == (p.shape, p.dtype, p.device)
    assert "StandIn(shape=(3, 5)" in repr(p.grad)
    opt.close()


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, [0.06, 0.08]), (1e-9, [6e-11, 8e-11]), (10.0, [0.3, 0.4])])
def test_b21_clip_grad_norm(three_and_four, max_norm, expected, foreach):
    params, opt = three_and_four
    assert torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=foreach).item() == 5.0
    assert exp_avgs(params, opt) == pytest.approx(expected, rel=2e-6)


def test_b21_clipping_inside_the_engine():
    for max_norm, expected in [(None, [0.3, 0.4]), (1.0, [0.06, 0.08]), (1e-9, [6e-11, 8e-11]), (10.0, [0.3, 0.4])]:
        params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        opt = zofftk.OffloadAdamW(params, lr=0.1, weight_decay=0.0, max_grad_norm=max_norm)
        (params[0] * 3 + params[1] * 4).sum().backward()
        assert exp_avgs(params, opt) == pytest.approx(expected, rel=2e-6)
        assert opt.last_grad_norm == 5.0
        opt.close()


def test_clipping_outside_and_inside_give_the_same_bits():
    def run(inside: bool):
        model = build()
        opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1 if inside else None)
        for step in range(5):
            loss_of(model, step).backward()
            if not inside:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
        opt.close()
        return model

    for p, q in zip(run(True).parameters(), run(False).parameters(), strict=True):
        assert_same_bits(p, q)


def test_norms(three_and_four):
    (p, q), opt = three_and_four
    assert p.grad.norm().item() == 3.0
    assert torch.linalg.vector_norm(q.grad).item() == 4.0
    assert [n.item() for n in torch._foreach_norm([p.grad, q.grad])] == [3.0, 4.0]
    assert torch.nn.utils.get_total_norm([p.grad, q.grad]).item() == 5.0
    assert exp_avgs([p, q], opt) == pytest.approx([0.3, 0.4])


def test_scaling(three_and_four):
    (p, q), opt = three_and_four
    p.grad.mul_(2.0)
    p.grad.div_(torch.tensor(4.0))
    q.grad *= torch.tensor([0.25])
    assert (p.grad.norm().item(), q.grad.norm().item()) == (1.5, 1.0)
    assert opt.grad(p).item() == 1.5
    assert exp_avgs([p, q], opt) == pytest.approx([0.15, 0.1])


def test_scaling_between_two_backwards_scales_the_first_alone(three_and_four):
    (p, q), opt = three_and_four
    torch._foreach_mul_([p.grad, q.grad], 0.5)
    (p * 10 + q * 20).sum().backward()
    assert [opt.grad(p).item(), opt.grad(q).item()] == [11.5, 22.0]
    assert exp_avgs([p, q], opt) == pytest.approx([1.15, 2.2])


def test_zero_grad_to_none_drops_what_was_gathered(three_and_four):
    (p, q), opt = three_and_four
    opt.zero_grad()
    assert p.grad is None
    assert opt.grad(p) is None
    opt.step()
    assert not opt.state
    p.sum().backward()
    assert exp_avgs([p], opt) == pytest.approx([0.1])
    assert q not in opt.state


@pytest.mark.parametrize("through", ["optimizer", "model", "foreach"])
def test_zero_grad_to_zeros_makes_true_zeros(three_and_four, through):
    (p, q), opt = three_and_four
    opt.step()
    before = p.item()
    if through == "optimizer":
        opt.zero_grad(set_to_none=False)
    elif through == "model":
        for param in (p, q):
            param.grad.zero_()
    else:
        torch._foreach_zero_([p.grad, q.grad])
    assert (p.grad.norm().item(), opt.grad(p).item()) == (0.0, 0.0)
    q.sum().backward()
    opt.step()
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.3 * 0.9)
    assert opt.state[q]["exp_avg"].item() == pytest.approx(0.4 * 0.9 + 0.1)
    assert p.item() != before


def test_dropping_the_gradient_by_hand_drops_it(three_and_four):
    (p, q), opt = three_and_four
    p.grad = None
    opt.step()
    assert p not in opt.state
    assert q in opt.state


def test_a_gradient_put_in_by_hand_is_used(three_and_four):
    (p, q), opt = three_and_four
    p.grad = torch.full((1,), 7.0)
    assert exp_avgs([p, q], opt) == pytest.approx([0.7, 0.4])


def test_gradients_by_hand_alone():
    p = torch.nn.Parameter(torch.ones(5, 3))
    opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0)
    p.grad = torch.ones(5, 3)
    opt.step()
    assert torch.allclose(p, torch.full((5, 3), 0.9))
    opt.step()  # as for every torch optimizer: the gradient is still there
    assert torch.allclose(p, torch.full((5, 3), 0.8))
    opt.close()


def test_a_stand_in_that_was_used_up_is_an_error(three_and_four):
    (p, q), opt = three_and_four
    opt.step()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0.*call zero_grad\(\) before the next backward"):
        (p * 3).sum().backward()
    opt.zero_grad()
    q.sum().backward()
    opt.step()
    with pytest.raises(RuntimeError, match=r"no gradient for parameter 1 of group 0.*zero_grad\(\)"):
        opt.step()


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.grad + 1,
        lambda p: p.grad.clone(),
        lambda p: p.grad.clamp_(-1, 1),
        lambda p: p.grad.sum(),
        lambda p: torch.linalg.vector_norm(p.grad, float("inf")),
        lambda p: p.grad.mul_(torch.ones(1, 7)),
        lambda p: p.grad.add_(torch.ones(3)),
        lambda p: torch.ones(1).mul_(p.grad),
        lambda p: torch.ones(1).add_(p.grad),
        lambda p: p.grad.tolist(),
        lambda p: p.grad.numpy(),
        lambda p: torch.nn.utils.clip_grad_value_([p], 1.0),
        lambda p: p.grad.share_memory_(),
        lambda p: p.grad.data_ptr(),
        lambda p: p.grad.untyped_storage(),
        lambda p: torch.nn.ParameterList([p]).share_memory(),
        lambda p: pickle.dumps(p.grad),
    ],
)
def test_anything_else_fails_with_a_sentence(use):
    p = torch.nn.Parameter(torch.zeros(1))
    opt = zofftk.OffloadAdamW([("layer.weight", p)], lr=0.1, weight_decay=0.0)
    p.sum().backward()
    with pytest.raises(StandInError, match=r"gradient of 'layer.weight', which have left .*optimizer.grad\(p\)"):
        use(p)
    assert exp_avgs([p], opt) == pytest.approx([0.1])  # the gradient is as it was
    opt.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b36_grad_scaler_unscales(dtype):
    p = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * 3).sum()).backward()
    scaler.unscale_(opt)
    assert torch.nn.utils.clip_grad_norm_([p], 100.0).item() == 6.0
    scaler.step(opt)
    scaler.update()
    assert torch.allclose(opt.state[p]["exp_avg"], torch.full((4,), 0.3))
    opt.zero_grad()
    before = p.detach().clone()
    scaler.scale((p * float("inf")).sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert_same_bits(p.detach(), before)
    assert scaler.get_scale() == 512.0
    assert opt.state[p]["step"] == 1
    opt.close()


def test_a_second_backward_of_a_channels_last_weight_warns_of_nothing():
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    opt = zofftk.OffloadAdamW([weight])
    for _ in range(2):
        (weight * 2).sum().backward()
    assert weight.grad.stride() == weight.stride()
    opt.close()


def test_the_data_of_a_stand_in_cannot_be_assigned():
    p = torch.nn.Parameter(torch.zeros(2))
    opt = zofftk.OffloadAdamW([p], lr=0.1, weight_decay=0.0)
    p.sum().backward()
    with pytest.raises(StandInError, match=r"p.grad.data cannot be assigned: set a gradient with optimizer.set_grad"):
        p.grad.data = torch.ones(2)
    assert p.grad.data is p.grad
    assert opt.grad(p).tolist() == [1.0, 1.0]
    opt.close()
