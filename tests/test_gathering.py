"""What is gathered for the next step, whatever is done to `p.grad` on the way: compared with plain gradients."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

import zofftk
from tests.compare import assert_same_bits
from zofftk.device.emulated import EmulatedDevice
from zofftk.standin import StandInError

pytestmark = pytest.mark.usefixtures("no_threads_left")


def zeros(*numels, dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in numels]


def offload(params, **options):
    return zofftk.OffloadAdamW(params, **{"lr": 0.1, "weight_decay": 0.0, **options})


def backward(*params, factor=1.0):
    sum(p.sum() * factor for p in params).backward()


def values(opt, *params):
    return [opt.grad(p).flatten()[0].item() for p in params]


# -- factors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_norm", [True, False])
@pytest.mark.parametrize("backwards", [1, 2, 3])
def test_a_factor_applies_to_what_came_before_it_alone(backwards, read_norm):
    (p,) = zeros(4)
    opt = offload([p])
    for _ in range(backwards):
        backward(p)
    if read_norm:
        assert p.grad.norm().item() == pytest.approx(2.0 * backwards)
    p.grad.mul_(0.5)
    backward(p)
    backward(p)
    assert values(opt, p) == [0.5 * backwards + 2]
    assert p.grad.norm().item() == pytest.approx(2 * (0.5 * backwards + 2))
    opt.close()


def test_the_norm_of_a_scaled_parameter_that_spans_buckets():
    q, p, r = zeros(64, 3 * 4096, 64)
    opt = offload([q, p, r], bucket_bytes=32768)
    backward(p, q, r)
    p.grad.mul_(0.25)
    backward(r, q)
    assert p.grad.norm().item() == pytest.approx(opt.grad(p).double().norm().item())
    assert p.grad.norm().item() == pytest.approx(0.25 * (3 * 4096) ** 0.5)
    opt.close()


def test_a_factor_on_a_used_gradient_does_not_reach_the_next():
    (p,) = zeros(4)
    opt = offload([p])
    for i in range(2):
        backward(p, factor=10.0 * (i + 1))
        opt.step()
        assert torch.nn.utils.clip_grad_norm_([p], 1.0).item() == pytest.approx(20.0 * (i + 1))
        opt.zero_grad()
    assert opt.state[p]["exp_avg"][0].item() == pytest.approx(0.9 * 1.0 + 2.0)
    opt.close()


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_the_bits_of_a_scaled_gradient_do_not_depend_on_other_parameters(bucket_bytes):
    def run(other):
        p, q = zeros(4096, 4096)
        opt = offload([p, q], bucket_bytes=bucket_bytes)
        torch.manual_seed(1)
        (p * torch.randn(4096)).sum().backward()
        p.grad.mul_(0.3)
        if other:
            backward(q)
            q.grad = None
        p.grad.mul_(1.7)
        opt.step()
        opt.close()
        return opt.state[p]["exp_avg"]

    assert_same_bits(run(other=True), run(other=False))


def test_the_norm_of_a_used_gradient():
    p, q = zeros(4, 4)
    opt = offload([p, q])
    backward(p, q)
    p.grad.mul_(0.5)
    q.grad.zero_()
    opt.step()
    assert [p.grad.norm().item(), q.grad.norm().item()] == [1.0, 0.0]
    opt.close()


def test_a_factor_on_a_true_zero_does_not_reach_the_next():
    (p,) = zeros(4)
    opt = offload([p])
    backward(p)
    opt.step()
    opt.zero_grad(set_to_none=False)
    p.grad.mul_(0.5)
    backward(p)
    assert values(opt, p) == [1.0]
    opt.close()


def test_two_steps_on_zeros():
    (p,) = zeros(2)
    opt = offload([p], device=EmulatedDevice(delays=1, poison=True))
    backward(p)
    opt.step()
    for _ in range(3):
        opt.zero_grad(set_to_none=False)
        opt.step()
    assert opt.state[p]["step"] == 4
    assert opt.state[p]["exp_avg"][0].item() == pytest.approx(0.1 * 0.9**3)
    opt.close()


# -- whose memory --------------------------------------------------------------------------------------------------


def test_add_takes_what_the_tensor_holds_now():
    a, b = zeros(4, 4)
    opt = offload([a, b])
    backward(a, b)
    noise = torch.empty(4)
    for i, p in enumerate((a, b)):
        noise.fill_(i + 1)
        p.grad.add_(noise)
    assert values(opt, a, b) == [2.0, 3.0]
    opt.close()


def test_autograds_own_buffers_may_be_reused():
    a, b = zeros(4, 4)
    opt = offload([a, b])
    upstream = torch.ones(4)
    (a * 1).backward(upstream)
    (a + 0).backward(upstream)
    upstream.zero_()
    assert values(opt, a) == [2.0]
    opt.close()
    assert b.grad is None


def test_backwards_in_two_threads():
    for _ in range(10):
        params = zeros(*[50] * 12)
        opt = offload(params)

        def work(mine):
            for _ in range(4):
                backward(*mine)

        threads = [threading.Thread(target=work, args=(params[i::2],)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert values(opt, *params) == [4.0] * 12
        opt.close()


def test_negated_views_keep_their_sign():
    (p,) = zeros(2)
    opt = offload([p])
    p.grad = torch.ones(2)._neg_view()
    opt.step()
    assert opt.state[p]["exp_avg"].tolist() == pytest.approx([-0.1, -0.1])
    opt.close()
    with pytest.raises(ValueError, match="negated or conjugated view"):
        offload([torch.nn.Parameter(torch.ones(2)._neg_view())])


# -- dropped and put aside -----------------------------------------------------------------------------------------


def test_the_statistics_of_a_dropped_gradient_have_arrived_before_others_take_their_place():
    p, q = zeros(4, 4)
    opt = offload([p, q])
    backward(p)
    backward(p)
    assert p.grad.norm().item() == pytest.approx(4.0)
    backward(q)
    backward(q)  # the first one is on its way down
    q.grad.zero_()
    assert p.grad.norm().item() == pytest.approx(4.0)
    opt.close()


def test_dropping_after_two_backwards_drops_both():
    (p,) = zeros(4)
    opt = offload([p])
    backward(p)
    backward(p)
    assert values(opt, p) == [2.0]
    p.grad = None
    backward(p, factor=5.0)
    assert values(opt, p) == [5.0]
    opt.close()


def test_a_true_zero_that_is_dropped_is_not_mistaken_for_the_next():
    (p,) = zeros(4)
    opt = offload([p])
    backward(p)
    opt.zero_grad(set_to_none=False)
    p.grad = None
    backward(p)
    assert torch.nn.utils.clip_grad_norm_([p], 1.0).item() == pytest.approx(2.0)
    assert values(opt, p) == [pytest.approx(0.5)]
    opt.close()


def test_grad_reads_what_the_step_would_take():
    (p,) = zeros(4)
    opt = offload([p])
    backward(p)
    p.grad = torch.full((4,), 3.0)
    assert values(opt, p) == [3.0]
    p.grad = None
    assert opt.grad(p) is None
    opt.close()


def test_a_gradient_put_aside_is_not_mistaken_for_the_next():
    (p,) = zeros(4)
    opt = offload([p])
    backward(p)
    aside, p.grad = p.grad, None
    backward(p, factor=100.0)
    p.grad = aside
    with pytest.raises(StandInError, match="put aside and then replaced"):
        opt.step()
    with pytest.raises(StandInError, match="was dropped"):
        aside.norm()
    opt.close()


@pytest.mark.parametrize("instead", [None, torch.ones(4)])
def test_a_gradient_put_aside_during_a_step_is_gone(instead):
    p, q = zeros(4, 4)
    opt = offload([p, q])
    backward(p, q)
    aside, p.grad = p.grad, instead
    opt.step()
    with pytest.raises(StandInError, match="was dropped"):
        aside.norm()
    opt.close()


def test_an_absent_small_parameter_between_two_present_ones_keeps_its_bits():
    for numel in (1, 5, 60, 64, 65):
        params = [torch.nn.Parameter(torch.ones(numel)) for _ in range(5)]
        opt = offload(params, weight_decay=0.5)
        backward(*params)
        opt.step()
        opt.zero_grad()
        before = [opt.state[p]["master"].clone() for p in params]
        backward(*params[::2])
        opt.step()
        for p, master in zip(params[1::2], before[1::2], strict=True):
            assert_same_bits(opt.state[p]["master"], master)
            assert_same_bits(p.detach(), master)
        opt.close()


def test_a_second_sparse_gradient_names_the_parameter():
    embedding = torch.nn.Embedding(10, 4)
    opt = offload(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    embedding.sparse = True
    with pytest.raises(TypeError, match="gradient of 'weight' is torch.sparse_coo, expected a dense one"):
        embedding(torch.tensor([1])).sum().backward()
    assert opt.grad(embedding.weight)[1].tolist() == [1.0] * 4
    opt.close()


# -- parameters ----------------------------------------------------------------------------------------------------


def test_a_gradient_by_hand_on_a_tensor_that_needs_none():
    p = torch.ones(2)
    opt = offload([p])
    p.grad = torch.ones(2)
    opt.step()
    assert torch.allclose(p, torch.tensor(0.9))
    opt.close()


def test_memory_that_is_shared_is_refused():
    whole = torch.ones(10)
    a, b = torch.nn.Parameter(whole), torch.nn.Parameter(whole)
    with pytest.raises(ValueError, match="'a' and 'b' share memory: expected one Parameter object"):
        offload([("a", a), ("b", b)])
    with pytest.raises(ValueError, match="share memory"):
        offload([torch.nn.Parameter(whole[:6]), torch.nn.Parameter(whole[5:])])
    with pytest.raises(ValueError, match="is expanded"):
        offload([torch.nn.Parameter(torch.ones(1).expand(5))])
    opt = offload([torch.nn.Parameter(whole[:5]), torch.nn.Parameter(whole[5:])])  # neighbours are fine
    opt.close()


def test_a_parameter_without_a_group_is_left_alone():
    a, b = zeros(3, 3)
    opt = offload([{"params": [a]}, {"params": [b]}])
    del opt.param_groups[1]
    backward(a, b)
    opt.step()
    assert opt.state[a]["step"] == 1
    assert b not in opt.state
    assert b.abs().sum() == 0
    opt.close()


@pytest.mark.parametrize("how", ["del", "clear"])
def test_deleting_a_state_starts_it_anew(how):
    a, b = zeros(3, 3)
    opt = offload([a, b])
    for _ in range(2):
        backward(a, b)
        opt.step()
        opt.zero_grad()
    if how == "del":
        del opt.state[a]
    else:
        opt.state[a].clear()
    backward(a, b)
    opt.step()
    assert [opt.state[p]["step"].item() for p in (a, b)] == [1, 3]
    assert a[0].item() == pytest.approx(-0.3)
    assert opt.state[a]["exp_avg"][0].item() == pytest.approx(0.1)
    opt.close()


def test_a_state_loaded_for_a_frozen_parameter_waits_for_it():
    p, q = zeros(3, 3)
    opt = offload([p, q])
    for _ in range(3):
        backward(p, q)
        opt.step()
        opt.zero_grad()
    saved = copy.deepcopy(opt.state_dict())
    opt.close()
    q.requires_grad_(False)
    again = offload([p, q])
    again.load_state_dict(saved)
    assert set(again.state_dict()["state"]) == {0, 1}
    q.requires_grad_(True)
    backward(p)
    q.grad = torch.ones(3)
    again.step()
    assert [again.state[x]["step"].item() for x in (p, q)] == [4, 4]
    assert_same_bits(again.state[q]["exp_avg"], again.state[p]["exp_avg"])
    again.close()


def test_weights_written_after_the_state_of_a_frozen_parameter_was_loaded_stand():
    p, q = zeros(3, 3)
    opt = offload([p, q])
    backward(p, q)
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    opt.close()
    again = offload([p, q.requires_grad_(False)])
    again.load_state_dict(saved)
    q.fill_(7.0)
    q.requires_grad_(True)
    q.grad = torch.ones(3)
    again.step()
    assert q[0].item() == pytest.approx(6.9)
    again.close()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("step", float("nan")),
        ("step", torch.ones(2)),
        ("step", -5),
        ("step", 1.5),
        ("exp_avg", torch.zeros(3, dtype=torch.complex64)),
        ("master", 3.0),
        ("lr", -1.0),
        ("betas", (1.5, 0.9)),
        ("eps", None),
    ],
)
def test_a_state_that_is_no_state_changes_nothing(where, value):
    p, q = zeros(3, 3)
    opt = offload([p, q])
    backward(p, q)
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["exp_avg"] = torch.full((3,), 9.0)
    if where in ("lr", "betas"):
        saved["param_groups"][0][where] = value
    elif where == "eps":
        del saved["param_groups"][0]["eps"]
    else:
        saved["state"][1][where] = value
    with pytest.raises(ValueError, match=where):
        opt.load_state_dict(saved)
    assert opt.state[p]["exp_avg"][0].item() == pytest.approx(0.1)
    assert opt.param_groups[0]["lr"] == 0.1
    opt.close()


def test_copies_and_pickles_are_refused():
    opt = offload(zeros(2))
    with pytest.raises(TypeError, match="cannot be copied: .*use its state_dict"):
        copy.deepcopy(opt)
    with pytest.raises(TypeError, match="cannot be pickled: .*use its state_dict"):
        pickle.dumps(opt)
    opt.close()


def test_a_step_in_inference_mode():
    (p,) = zeros(2)
    opt = offload([p])
    backward(p)
    with torch.inference_mode():
        opt.step()
    opt.zero_grad()
    backward(p)
    opt.step()
    assert opt.state[p]["step"] == 2
    opt.close()
    with torch.inference_mode():
        inside = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="is an inference tensor"):
        offload([inside])


def test_numbers_of_numpy_are_numbers():
    opt = offload(zeros(2), max_grad_norm=np.float32(1.0), threads=np.int64(1))
    opt.close()
    with pytest.raises(TypeError, match="lr must be a number, got '0.1'"):
        zofftk.OffloadAdamW(zeros(2), lr="0.1")
    with pytest.raises(ValueError, match="the groups hold no parameters"):
        offload([{"params": []}])


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


def test_b88_ctrl_c_inside_a_step_leaves_step_k_or_k_plus_1():
    code = textwrap.dedent("""
        import signal, sys, time, torch, zofftk
        from zofftk.device.emulated import EmulatedDevice

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it, and so do we

        class Slow(EmulatedDevice):
            def _host_task(self, label, task):
                super()._host_task(label, lambda: (time.sleep(0.01), task()))

        params = [torch.nn.Parameter(torch.ones(4096)) for _ in range(12)]
        opt = zofftk.OffloadAdamW(params, lr=0.1, weight_decay=0.0, bucket_bytes=1, device=Slow())
        print("ready", flush=True)
        try:
            while True:
                sum(p.sum() for p in params).backward()
                opt.step()
                opt.zero_grad()
        except KeyboardInterrupt:
            opt.zero_grad()
            states = [s for s in opt.state_dict()["state"].values()]
            print(len({(s["step"].item(), s["exp_avg"][0].item(), s["master"][0].item()) for s in states}),
                  len({p[0].item() for p in params}), params[0][0].item() == states[0]["master"][0].item())
            sum(p.sum() for p in params).backward()
            opt.step()
    """)
    for delay_s in (0.05, 0.11, 0.17):
        # A second OpenMP thread would spin, for seconds where the cores are shared.
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
        assert child.stdout.readline().strip() == "ready"
        threading.Event().wait(0.3 + delay_s)
        os.kill(child.pid, signal.SIGINT)
        output, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        assert output.strip() == "1 1 True"
