"""Models compiled with `torch.compile`, before and after the optimizer was built."""

from __future__ import annotations

import collections

import pytest
import torch

import zofftk
from tests.compare import assert_same_bits
from tests.shadow import Shadow
from tests.small_gpt import build, loss_of

pytestmark = [
    pytest.mark.usefixtures("no_threads_left", "fresh_compiler"),
    # Dynamo's own, where a graph goes on after a break, and Inductor's import.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def mlp(dtype):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).to(dtype)


def rows(step, dtype):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(opt, forward, params, dtype):
    """3 steps of 2 backwards, clipped."""
    losses = []
    for step in range(3):
        for micro in range(2):
            loss = forward(rows(2 * step + micro, dtype)).float().square().mean() / 2
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(params, 0.1)
        opt.step()
        opt.zero_grad()
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("compiled_first", "handed_over"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_b62_same_training_as_the_uncompiled_model(backend, compiled_first, dtype, handed_over, monkeypatch):
    """Same bits where the operations are the same; inductor fuses them, which changes roundings."""
    plain = mlp(dtype)
    plain_opt = zofftk.OffloadAdamW(plain.parameters(), lr=1e-2)
    expected = train(plain_opt, plain, list(plain.parameters()), dtype)

    model = mlp(dtype)
    compiled = torch.compile(model, backend=backend) if compiled_first else None
    opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-2)
    deliveries = count_deliveries(opt, monkeypatch)
    compiled = compiled or torch.compile(model, backend=backend)
    if handed_over:
        zofftk.offload(compiled, opt)
    else:
        shadow = Shadow(opt)
    losses = train(opt, compiled, list(model.parameters()), dtype)
    opt.synchronize()

    assert deliveries == {index: 6 for index in range(4)}, "one for each parameter and backward"
    if not handed_over:
        assert len(shadow.grads) == 3
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert opt.state[p]["step"] == 3
        ours, theirs = opt.state[p]["master"], plain_opt.state[q]["master"]
        if backend == "inductor":
            near = 1e-5 if dtype == torch.float32 else 5e-3
            torch.testing.assert_close(ours, theirs, rtol=near, atol=near, msg=name)
        else:
            assert_same_bits(ours, theirs, name)
    if backend == "inductor":
        assert losses == pytest.approx(expected, rel=1e-3)
    else:
        assert losses == expected
    opt.close()
    plain_opt.close()


def count_deliveries(opt, monkeypatch):
    """How often each parameter's gradient reaches the engine."""
    counts = collections.Counter()
    engine, original = opt._engine, opt._engine._gather

    def counted(managed, grad):
        counts[managed.index] += 1
        original(managed, grad)

    monkeypatch.setattr(engine, "_gather", counted)
    return counts


@pytest.mark.parametrize("in_place", [False, True])
def test_b62_a_gpt_with_graph_breaks_and_tied_weights(in_place):
    """Compiled in place, or wrapped; with one graph break in each block."""
    plain, model = build(), build()
    for each in (plain, model):
        for block in each.blocks:
            block.register_forward_hook(torch.compiler.disable(lambda module, args, out: out * 1.0))
    opts = [zofftk.OffloadAdamW(each.parameters(), lr=1e-2, max_grad_norm=1.0) for each in (plain, model)]
    if in_place:
        model.compile(backend="aot_eager")
        run = model
    else:
        run = torch.compile(model, backend="aot_eager")
    for step in range(3):
        for forward, opt in zip((plain, run), opts, strict=True):
            loss_of(forward, step).backward()
            opt.step()
            opt.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(opts[1].state[p]["master"], opts[0].state[q]["master"], name)
    for opt in opts:
        opt.close()
