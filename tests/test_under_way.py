"""While an update is under way: what torch does not show, signals, forks and many readers at once."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from tests.test_pending import SlowUpdates, stepped
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture(scope="module")
def new_values():
    model, opt = stepped(hand_over=False)
    opt.close()
    return [p.detach().clone() for p in model.parameters()]


def test_memory_that_others_share_is_not_left_behind(new_values):
    """A view, a detached copy or a kept state dict is read without the parameter being asked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = zofftk.OffloadAdamW(model.named_parameters(), lr=0.1, bucket_bytes=1, device=SlowUpdates())
    zofftk.offload(model, opt)
    kept = [model[0].weight.t(), model[0].bias.detach(), model.state_dict()["1.weight"]]
    model(torch.ones(2, 8)).square().sum().backward()
    opt.step()
    for alias, new in zip(kept, [new_values[0].t(), *new_values[1:3]], strict=True):
        assert_same_bits(alias.detach(), new)
    opt.close()


def test_a_graph_from_before_the_step_is_torchs_own_error():
    model, opt = stepped()
    opt.zero_grad()
    x = torch.ones(2, 8, requires_grad=True)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)
    opt.close()


def test_states_are_final_when_they_are_read():
    model, opt = stepped()
    states = [opt.state[p] for p in model.parameters()]
    read = [state["exp_avg"].clone() for state in states]
    opt.synchronize()
    for state, early in zip(states, read, strict=True):
        assert_same_bits(state["exp_avg"], early)
        assert state["step"] == 1
        assert early.any()
    opt.close()


def test_a_fork_brings_the_new_values(new_values):
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child(model):
        queue.put([p.detach().tolist() for p in model.parameters()])

    model, opt = stepped()
    process = context.Process(target=child, args=(model,))
    process.start()
    values = queue.get()
    process.join()
    for value, new in zip(values, new_values, strict=True):
        assert_same_bits(torch.tensor(value), new)
    opt.close()


def test_per_sample_gradients_of_a_model_that_was_handed_over():
    def gradients(hand_over):
        model, opt = stepped(hand_over)

        def loss(params, x):
            return torch.func.functional_call(model, params, (x,)).square().sum()

        params = dict(model.named_parameters())
        result = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, torch.eye(8))
        opt.close()
        return list(result.values())

    for a, b in zip(gradients(True), gradients(False), strict=True):
        assert_same_bits(a.detach(), b.detach())


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_trace_sees_the_model_and_not_the_landing():
    def traced(hand_over):
        model, opt = stepped(hand_over)
        opt.zero_grad()
        trace = torch.jit.trace(model, torch.ones(2, 8))
        opt.close()
        return str(trace.inlined_graph).count("aten::"), trace(torch.ones(2, 8)).detach()

    (count, output), (expected_count, expected) = traced(True), traced(False)
    assert count == expected_count
    assert_same_bits(output, expected)


# One layer says that it has no nested tensors, since its number of heads is odd; the profiler that it found no CUDA.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_transformer_layers_keep_their_fused_kernel_in_evaluation():
    def outputs(hand_over):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 16))
        opt = zofftk.OffloadAdamW(model.parameters(), lr=0.01, device=SlowUpdates())
        if hand_over:
            zofftk.offload(model, opt)
        results = []
        for _ in range(3):
            model.train()
            model(torch.ones(2, 4, 16)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            model.eval()
            with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                results.append(model(torch.ones(2, 4, 16)))
            fused = [event for event in profile.events() if "transformer_encoder_layer_fwd" in event.name]
            assert len(fused) >= 2
        opt.close()
        return torch.stack(results)

    assert_same_bits(outputs(True), outputs(False))


def test_a_parametrization_between_a_step_and_the_next_forward():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight + weight.t()

    def output(hand_over):
        model, opt = stepped(hand_over)
        nn.utils.parametrize.register_parametrization(model[1], "weight", Symmetric())
        result = model(torch.ones(2, 8))
        opt.close()
        return result.detach()

    assert_same_bits(output(True), output(False))


def test_a_shallow_copy_of_a_module_works(new_values):
    model, opt = stepped()
    twin = copy.copy(model[1])
    output = twin(torch.ones(2, 8))
    assert_same_bits(output, nn.functional.linear(torch.ones(2, 8), *new_values[2:]))
    opt.close()


@pytest.mark.parametrize("place", ["forward", "backward", "close", "refresh", "load", "state_dict"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_while_values_land_loses_nothing(place, number, new_values):
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = zofftk.OffloadAdamW(model.named_parameters(), lr=0.1, bucket_bytes=1, device=SlowUpdates(), staging_slots=1)
    zofftk.offload(model, opt)
    model(torch.ones(2, 8)).square().sum().backward()
    opt.step()
    opt.zero_grad()
    loss = model[1](torch.ones(2, 8)).sum() if place == "backward" else None  # the first is still under way then
    saved = opt.state_dict() if place == "load" else None
    act = {
        "forward": lambda: model(torch.ones(2, 8)),
        "backward": lambda: loss.backward(),
        "close": opt.close,
        "refresh": opt.refresh,
        "load": lambda: opt.load_state_dict(saved),
        "state_dict": model.state_dict,
    }[place]
    before = signal.signal(number, interrupt)
    timer = threading.Timer(0.002, os.kill, (os.getpid(), number))
    gc.disable()  # a callback of the collector (hypothesis has one) would swallow what the handler raises
    try:
        timer.start()
        act()
        timer.join()
        time.sleep(0.01)
    except Interrupted:
        pass
    finally:
        timer.join()
        signal.signal(number, before)
        gc.enable()
    for p, new in zip(model.parameters(), new_values, strict=True):
        assert_same_bits(p.detach(), new)
    assert place == "close" or opt._engine.ring.free == 1
    opt.close()


def test_readers_in_many_threads_at_once():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    faults = []
    try:
        for _ in range(30):
            model, opt = stepped(device=EmulatedDevice())

            def read(model=model):
                try:
                    for p in model.parameters():
                        p.sum()
                except Exception as error:
                    faults.append(error)

            threads = [threading.Thread(target=read) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            opt.close()
    finally:
        sys.setswitchinterval(interval)
    assert not faults


@pytest.mark.parametrize("update", ["synchronous", "delayed"])
def test_another_thread_evaluates_while_this_one_trains(update):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(70, 70) for _ in range(4)))
    opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=1, update=update, delay_after=1)
    zofftk.offload(model, opt)
    x, stop, faults = torch.ones(2, 70), threading.Event(), []

    def evaluate():
        try:
            while not stop.is_set():
                with torch.no_grad():
                    model(x)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(30):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    opt.close()
    assert not faults


def test_wrong_models():
    model, opt = stepped()
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        zofftk.offload(nn.Linear(2, 2), opt)
    opt.close()
    with pytest.raises(RuntimeError, match="this optimizer is closed"):
        zofftk.offload(model, opt)
