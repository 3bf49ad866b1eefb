"""With the model handed over, `step()` returns early, and nobody sees an old or a torn parameter."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import zofftk
from tests.compare import assert_same_bits
from tests.small_gpt import build, loss_of
from zofftk.device.emulated import EmulatedDevice

pytestmark = pytest.mark.usefixtures("no_threads_left")


class SlowUpdates(EmulatedDevice):
    """Every task of the host stream takes 4 ms longer."""

    def _host_task(self, label, task):
        super()._host_task(label, lambda: (time.sleep(0.004), task()))


def run(steps=6, *, hand_over=True, between=lambda model, opt: None, device=None, **options):
    model = build(torch.bfloat16)
    opt = zofftk.OffloadAdamW(
        model.parameters(), lr=1e-2, max_grad_norm=0.5, device=device, **{"bucket_bytes": 16 * 1024, **options}
    )
    if hand_over:
        zofftk.offload(model, opt)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        losses.append(loss.detach())
        loss.backward()
        opt.step()
        opt.zero_grad()
        between(model, opt)
    opt.synchronize()
    return model, opt, losses


@pytest.fixture(scope="module")
def plain():
    model, opt, losses = run(hand_over=False)
    opt.close()
    return model, opt, losses


def assert_same(result, plain):
    model, opt, losses = result
    assert_same_bits(torch.stack(losses), torch.stack(plain[2]), "losses")
    for (name, p), q in zip(model.named_parameters(), plain[0].parameters(), strict=True):
        assert_same_bits(p, q, name)
        for state in ("master", "exp_avg", "exp_avg_sq"):
            assert_same_bits(opt.state[p][state], plain[1].state[q][state], f"{state} of {name}")
    opt.close()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_same_bits_with_a_slow_host(plain, slots):
    assert_same(run(device=SlowUpdates(poison=True), staging_slots=slots), plain)


@pytest.mark.parametrize("seed", range(5))
def test_same_bits_with_delays(plain, seed):
    assert_same(run(device=EmulatedDevice(delays=seed, poison=True), staging_slots=1 + seed % 3), plain)


def test_step_returns_early_and_the_update_runs_beside_forward():
    model, opt, _ = run(device=SlowUpdates(keep_spans=True))
    backs = [span for span in opt.trace.spans if span.label.startswith("copy back")]
    adams = [span for span in opt.trace.spans if span.label.startswith("adam")]
    start = time.perf_counter()
    loss = loss_of(model, 99)
    loss.backward()
    opt.step()
    returned = time.perf_counter()
    logits_ready = loss_of(model, 100)
    forward_done = time.perf_counter()
    spans = [span for span in opt.trace.spans if span.start_s > start and span.label.startswith("adam")]
    assert len(spans) == len(opt._engine.buckets) > 4
    assert spans[-1].start_s > returned  # the last update had not begun when step() returned
    assert spans[-1].stop_s < forward_done  # the first parameters of the line are those of the last layers
    assert backs
    assert adams
    assert torch.isfinite(logits_ready)
    opt.close()


def test_b22_evaluation_in_between_sees_the_new_weights(plain):
    seen = []

    def evaluate(model, opt):
        model.eval()
        with torch.inference_mode():
            seen.append(loss_of(model, 1000).clone())
        model.train()

    assert_same(run(between=evaluate, device=SlowUpdates()), plain)
    expected = []

    def evaluate_plain(model, opt):
        with torch.no_grad():
            expected.append(loss_of(model, 1000))

    _, opt, _ = run(hand_over=False, between=evaluate_plain)
    opt.close()
    assert_same_bits(torch.stack(seen), torch.stack(expected))


def test_state_dicts_in_between_hold_the_new_values():
    files = []

    def save(model, opt):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        masters = [opt.state_dict()["state"][i]["master"].clone() for i in range(len(list(model.parameters())))]
        files.append((weights, masters))

    model, opt, _ = run(steps=2, between=save, device=SlowUpdates())
    names = [name for name, _ in model.named_parameters()]
    for weights, masters in files:
        for name, master in zip(names, masters, strict=True):
            assert_same_bits(weights[name], master.to(torch.bfloat16), name)
    opt.close()


def test_a_part_of_the_model_used_alone_sees_the_new_weights():
    outputs = []

    def use_part(model, opt):
        with torch.no_grad():
            outputs.append(model.blocks[0](torch.ones(1, 4, 48, dtype=torch.bfloat16)))

    for hand_over in (True, False):
        _, opt, _ = run(steps=3, hand_over=hand_over, between=use_part, device=SlowUpdates())
        opt.close()
    for early, late in zip(outputs[:3], outputs[3:], strict=True):
        assert_same_bits(early, late)


def test_accumulation_and_unused_modules():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, both):
            return self.always(x) + (self.sometimes(x) if both else 0)

    def train(hand_over):
        torch.manual_seed(0)
        model = Branches()
        opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-2, bucket_bytes=1, device=SlowUpdates())
        if hand_over:
            zofftk.offload(model, opt)
        for step, both in enumerate([True, False, True, False, False, True]):
            for micro in range(2):
                x = torch.full((2, 64), 0.1 * step + micro)
                model(x, both).square().sum().backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        opt.close()
        return model

    for p, q in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert_same_bits(p, q)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(reentrant):
    from torch.utils.checkpoint import checkpoint

    def train(hand_over):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        class Stack(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers

            def forward(self, x):
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                return x

        model = Stack()
        opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-2, bucket_bytes=1, device=SlowUpdates())
        if hand_over:
            zofftk.offload(model, opt)
        for step in range(4):
            model(torch.full((2, 32), 1.0 + step, requires_grad=True)).sum().backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        opt.close()
        return model

    for p, q in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert_same_bits(p, q)


# torch looks at .grad of an inner tensor while it traces, and hides its own warning only where none are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("what", ["model", "block"])
def test_compiled_before(what):
    def train(hand_over):
        torch._dynamo.reset()
        model = build(torch.float32)
        if what == "block":
            model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
            whole = model
        else:
            whole = torch.compile(model, backend="aot_eager")
        opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-2, bucket_bytes=16 * 1024, device=SlowUpdates())
        if hand_over:
            zofftk.offload(whole, opt)
        for step in range(3):
            loss_of(whole, step).backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        opt.close()
        return model

    for p, q in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert_same_bits(p, q)


def test_compiled_in_place_before_waits_in_the_step(caplog):
    model = build(torch.float32)
    model.blocks[0].compile(backend="aot_eager")
    opt = zofftk.OffloadAdamW(model.parameters())
    zofftk.offload(model, opt)
    assert not opt.overlaps
    assert "blocks.0 was compiled in place" in caplog.text
    opt.close()


def test_remove_makes_step_wait_again():
    layer = nn.Linear(8, 8)
    opt = zofftk.OffloadAdamW(layer.parameters(), lr=0.1, device=SlowUpdates())
    handle = zofftk.offload(layer, opt)
    handle.remove()
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 8)).sum().backward()
    opt.step()
    assert (layer.weight != before).all()
    opt.close()


def test_wrong_arguments():
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="expects one of zofftk.s optimizers, got AdamW"):
        zofftk.offload(layer, torch.optim.AdamW(layer.parameters()))
    opt = zofftk.OffloadAdamW(layer.parameters())
    with pytest.raises(TypeError, match="expects a torch module, got generator"):
        zofftk.offload(layer.parameters(), opt)
    opt.close()


def test_a_layer_that_is_added_later_is_waited_for():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(8, 8), None

        def forward(self, x):
            return self.last(self.first(x) if self.first is not None else x)

    def train(hand_over):
        torch.manual_seed(0)
        model = Grows()
        opt = zofftk.OffloadAdamW(model.parameters(), lr=0.1, bucket_bytes=1, device=SlowUpdates())
        if hand_over:
            zofftk.offload(model, opt)
        losses = []
        for step in range(5):
            loss = model(torch.ones(2, 8)).square().mean()
            losses.append(loss.detach())
            loss.backward()
            opt.step()
            opt.zero_grad()
            if step == 1:
                model.first = nn.Linear(8, 8)
                opt.add_param_group({"params": [*model.first.parameters()]})
        opt.close()
        return torch.stack(losses)

    assert_same_bits(train(True), train(False))


def test_the_model_works_on_after_close():
    model = nn.Sequential(nn.Linear(8, 8))
    opt = zofftk.OffloadAdamW(model.parameters(), lr=0.1, device=SlowUpdates())
    handle = zofftk.offload(model, opt)
    model(torch.ones(1, 8)).sum().backward()
    opt.step()
    opt.close()
    model(torch.ones(1, 8))
    model.state_dict()
    handle.remove()
    model(torch.ones(1, 8))
