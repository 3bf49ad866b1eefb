"""`accelerate` around the optimizer: prepare, accumulate, clipping, the loss scaler, saved states."""

from __future__ import annotations

import os

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

import zofftk  # noqa: E402
from tests.compare import assert_same_bits  # noqa: E402
from tests.rank_processes import run_ranks  # noqa: E402
from tests.shadow import Shadow  # noqa: E402
from tests.small_gpt import build, loss_of  # noqa: E402
from zofftk.standin import StandInError  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture
def new_accelerator():
    """`Accelerator` on the CPU; its state is global, so it is reset."""

    def new(**options):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return accelerate.Accelerator(cpu=True, **options)

    yield new
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def linear():
    torch.manual_seed(1)
    return torch.nn.Linear(4, 1)


def rows(count, size):
    data = torch.randn(count * size, 4, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(data, batch_size=size)


def test_b03_accumulate_is_one_large_batch(new_accelerator):
    """8 batches, 2 to an update, and clipping where the gradients are complete: what 4 merged batches give torch."""
    accelerator = new_accelerator(gradient_accumulation_steps=2)
    model, merged = linear(), linear()
    opt = zofftk.OffloadAdamW(model.parameters(), lr=0.1)
    shadow = Shadow(opt, feeds_itself=False)
    prepared, wrapped, batches = accelerator.prepare(model, opt, rows(8, 2))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: 1.0 / (step + 1)))
    norms = []
    for batch in batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(batch).square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(prepared.parameters(), 0.1)))
                shadow.feed()
            wrapped.step()
            schedule.step()
            wrapped.zero_grad()

    reference = torch.optim.AdamW(merged.parameters(), lr=0.1)
    expected = []
    for step, batch in enumerate(rows(4, 4)):
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        merged(batch).square().mean().backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(merged.parameters(), 0.1)))
        reference.step()
        reference.zero_grad()
    assert len(shadow.grads) == 4
    assert norms == pytest.approx(expected, rel=1e-5)
    assert min(norms) > 0.1
    for p, q in zip(model.parameters(), merged.parameters(), strict=True):
        assert opt.state[p]["step"] == 4
        torch.testing.assert_close(opt.state[p]["master"], q, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(opt.state[p]["exp_avg"], reference.state[q]["exp_avg"], rtol=1e-4, atol=1e-7)
    opt.close()


def test_b03_accumulate_over_two_ranks():
    """16 batches, 2 on each of 2 ranks to an update; `prepare` puts DistributedDataParallel around the model."""

    def work(rank):
        as_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in as_torchrun.items()})
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == 2
        model, merged = linear(), linear()
        opt = zofftk.OffloadAdamW(model.parameters(), lr=0.1)
        prepared, wrapped, batches = accelerator.prepare(model, opt, rows(16, 2))
        assert isinstance(prepared, torch.nn.parallel.DistributedDataParallel)
        zofftk.offload(prepared, opt)
        norms = []
        for batch in batches:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(batch).square().mean())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(prepared.parameters(), 0.1)))
                wrapped.step()
                wrapped.zero_grad()

        reference = torch.optim.AdamW(merged.parameters(), lr=0.1)
        expected = []
        for batch in rows(4, 8):
            merged(batch).square().mean().backward()
            expected.append(float(torch.nn.utils.clip_grad_norm_(merged.parameters(), 0.1)))
            reference.step()
            reference.zero_grad()
        assert norms == pytest.approx(expected, rel=1e-5)
        assert min(norms) > 0.1
        for p, q in zip(model.parameters(), merged.parameters(), strict=True):
            assert opt.state[p]["step"] == 4
            torch.testing.assert_close(opt.state[p]["master"].full(), q.detach(), rtol=1e-5, atol=1e-6)
            exp_avg = opt.state[p]["exp_avg"].full()
            torch.testing.assert_close(exp_avg, reference.state[q]["exp_avg"], rtol=1e-4, atol=1e-7)
        opt.close()

    run_ranks(2, work)


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, (0.06, 0.08)), (1e-9, (6e-11, 8e-11)), (10.0, (0.3, 0.4))])
def test_b21_clip_grad_norm_clips_and_returns_the_norm(new_accelerator, max_norm, expected):
    accelerator = new_accelerator()
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    opt = zofftk.OffloadAdamW(params, lr=0.1)
    wrapped = accelerator.prepare(opt)
    accelerator.backward((3 * params[0] + 4 * params[1]).sum())
    assert float(accelerator.clip_grad_norm_(params, max_norm)) == pytest.approx(5.0)
    wrapped.step()
    # torch's clipping adds 1e-6 to the norm it divides by.
    assert [opt.state[p]["exp_avg"].item() for p in params] == pytest.approx(expected, rel=1e-5)
    opt.close()


def test_clipping_by_value_is_refused(new_accelerator):
    accelerator = new_accelerator()
    p = torch.nn.Parameter(torch.zeros(1))
    opt = zofftk.OffloadAdamW([p])
    accelerator.prepare(opt)
    accelerator.backward(p.sum())
    with pytest.raises(StandInError, match="values of the gradient of parameter 0 of group 0"):
        accelerator.clip_grad_value_([p], 0.1)
    opt.close()


def test_prepare_moves_no_state(new_accelerator, monkeypatch):
    """It takes the state through the device and back: before the first step there must be nothing in it."""
    moved = []
    original = accelerate.optimizer.move_to_device

    def counted(state, device):
        if isinstance(state, torch.Tensor):
            moved.append(state.nbytes)
        return original(state, device)

    monkeypatch.setattr(accelerate.optimizer, "move_to_device", counted)
    p = torch.nn.Parameter(torch.zeros(1000))
    opt = zofftk.OffloadAdamW([p])
    accelerator = new_accelerator()
    wrapped = accelerator.prepare(opt)
    assert sum(moved) == 0
    p.sum().backward()
    wrapped.step()
    assert accelerator.prepare(wrapped) is wrapped
    assert sum(moved) == 0
    new_accelerator().prepare(opt)
    assert sum(moved) == 3 * 4000 + 4, "what is counted is what there is"
    opt.close()


def test_b05_prepare_leaves_torchs_optimizer_to_torch(new_accelerator):
    model = linear()
    prepared = new_accelerator().prepare(torch.optim.AdamW(model.parameters()))
    assert type(prepared.optimizer) is torch.optim.AdamW
    model(torch.ones(4)).backward()
    assert type(model.weight.grad) is torch.Tensor


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("handed_over", [False, True])
def test_saved_and_loaded_state_goes_on_with_the_same_bits(new_accelerator, tmp_path, mixed_precision, handed_over):
    def train(prepared, wrapped, accelerator, steps):
        for step in steps:
            accelerator.backward(loss_of(prepared, step))
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            wrapped.step()
            wrapped.zero_grad()

    def start():
        accelerator = new_accelerator(mixed_precision=mixed_precision)
        model = build(torch.float32)
        opt = zofftk.OffloadAdamW(model.parameters(), lr=1e-2)
        prepared, wrapped = accelerator.prepare(model, opt)
        if handed_over:
            zofftk.offload(prepared, opt)
        return model, opt, (prepared, wrapped, accelerator)

    whole, whole_opt, parts = start()
    shadow = Shadow(whole_opt)
    train(*parts, range(2))
    parts[-1].save_state(str(tmp_path))
    train(*parts, range(2, 4))
    whole_opt.synchronize()
    assert len(shadow.grads) == 4

    resumed, opt, parts = start()
    train(*parts, range(7, 9))  # something to be forgotten
    parts[-1].load_state(str(tmp_path))
    train(*parts, range(2, 4))
    opt.synchronize()
    for (name, p), q in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach(), name)
        for key, value in whole_opt.state[p].items():
            assert_same_bits(value, opt.state[q][key], f"{key} of {name}")
    whole_opt.close()
    opt.close()


def test_b45_its_loss_scaler_unscales_once_and_skips_an_overflow(new_accelerator):
    """The wrapper exchanges `step` for one that notes whether the scaler has called it."""
    new_accelerator()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    opt = zofftk.OffloadAdamW([p], lr=0.1)
    wrapped = accelerate.optimizer.AcceleratedOptimizer(opt, scaler=scaler)
    scaler.scale(3 * p.sum()).backward()
    scaler.unscale_(opt)
    assert float(torch.nn.utils.clip_grad_norm_([p], 2.0)) == pytest.approx(3.0)
    wrapped.step()
    assert not wrapped.step_was_skipped
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.2)
    wrapped.zero_grad()

    before = {name: value.clone() for name, value in opt.state[p].items()}
    scaler.scale(p.sum() * float("inf")).backward()
    wrapped.step()
    wrapped.zero_grad()
    assert wrapped.step_was_skipped
    assert scaler.get_scale() == 512
    for name, value in before.items():
        assert_same_bits(opt.state[p][name], value, name)

    scaler.scale(3 * p.sum()).backward()
    wrapped.step()
    assert not wrapped.step_was_skipped
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.9 * 0.2 + 0.3)
    opt.close()
