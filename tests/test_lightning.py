"""Lightning's `Trainer`: the closure with backward in it, accumulation, clipping, precision plugins, checkpoints."""

from __future__ import annotations

import pytest
import torch

lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

import zofftk  # noqa: E402
from tests.compare import assert_same_bits  # noqa: E402
from tests.shadow import Shadow  # noqa: E402
from tests.small_gpt import build, loss_of  # noqa: E402
from zofftk.standin import StandInError  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("no_threads_left"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),  # its own, on torch 2.13
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


class One(lightning.LightningModule):
    """One parameter whose gradient is `grad` in every batch, and a layer the optimizer does not know."""

    def __init__(self, grad=3.0, dtype=None):
        super().__init__()
        self.p, self.grad = torch.nn.Parameter(torch.zeros(1, dtype=dtype)), grad

    def training_step(self, batch, index):
        return (self.grad * self.p).sum()

    def configure_optimizers(self):
        self.opt = zofftk.OffloadAdamW([self.p], lr=0.1, weight_decay=0.0)
        return self.opt


class Words(lightning.LightningModule):
    """The small GPT; the gradients the update gets are compared after clipping."""

    def __init__(self, *, handed_over=False):
        super().__init__()
        self.model, self.handed_over, self.losses = build(torch.float32), handed_over, []

    def training_step(self, batch, index):
        loss = loss_of(self.model, int(batch))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        self.opt = zofftk.OffloadAdamW(self.model.parameters(), lr=1e-2)
        if self.handed_over:
            zofftk.offload(self.model, self.opt)
        self.shadow = Shadow(self.opt, feeds_itself=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda step: 1.0 / (step + 1))
        return {"optimizer": self.opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.shadow.feed()


def fit(module, batches, ckpt_path=None, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = quiet | {"enable_model_summary": False, "max_epochs": 1, "accelerator": "cpu"} | options
    trainer = lightning.Trainer(**options)
    trainer.fit(module, torch.utils.data.DataLoader(range(batches)), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true"])
def test_b87_accumulate_grad_batches_and_clipping(precision):
    """8 batches, 4 to an update: the mean gradient is 3, clipped to 1; exp_avg is 0.1 and then 0.19."""
    module = One()
    seen = []
    module.on_train_batch_end = lambda *_: seen.append(
        [float(state[key]) for state in module.opt.state.values() for key in ("step", "exp_avg")]
    )
    fit(module, 8, precision=precision, accumulate_grad_batches=4, gradient_clip_val=1.0)
    assert seen[:3] == [[], [], []]
    assert seen[3] == seen[6] == pytest.approx([1.0, 0.1])
    assert seen[7] == pytest.approx([2.0, 0.19])
    assert module.opt.last_grad_norm == pytest.approx(1.0, rel=1e-5)
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision, torch.float32)
    assert_same_bits(module.p.detach(), module.opt.state[module.p]["master"].to(dtype))
    module.opt.close()


def test_clipping_by_value_is_refused():
    module = One()
    with pytest.raises(StandInError, match="clamp.* needs the values of the gradient of parameter 0 of group 0"):
        fit(module, 1, gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert not module.opt.state
    module.opt.close()


def test_b36_a_loss_scaler_unscales_before_clipping():
    """fp16 autocast with a scaler is for GPUs; on the CPU its plugin is handed a scaler for the CPU."""
    module = One()
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024))
    fit(module, 1, plugins=[plugin], gradient_clip_val=1.0)
    assert module.opt.state[module.p]["exp_avg"].item() == pytest.approx(0.1)
    assert plugin.scaler.get_scale() == 1024
    module.opt.close()

    overflowing = One(grad=float("inf"))
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024))
    fit(overflowing, 1, plugins=[plugin])
    assert not overflowing.opt.state
    assert overflowing.p.item() == 0.0
    assert plugin.scaler.get_scale() == 512
    overflowing.opt.close()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_each_step_is_torchs(precision):
    module = Words()
    fit(module, 6, precision=precision, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert len(module.shadow.grads) == 3
    for grads in module.shadow.grads:
        norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads.values()]))
        assert float(norm) == pytest.approx(0.5, rel=1e-5), "it was clipped"
    assert module.opt.param_groups[0]["lr"] == pytest.approx(1e-2 / 4), "the schedule goes by updates"
    module.opt.close()


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, monkeypatch, handed_over):
    """Lightning moves the states to the device after loading, and back when it ends: here it makes copies of them."""
    options = {"precision": "bf16-true", "gradient_clip_val": 1.0}
    whole = Words(handed_over=handed_over)
    fit(whole, 2, max_epochs=2, **options)
    whole.opt.synchronize()

    moved = []
    monkeypatch.setattr(
        "lightning.fabric.utilities.optimizer.move_data_to_device",
        lambda value, device: moved.append(device) or value.clone(),
    )
    first, second = Words(handed_over=handed_over), Words(handed_over=handed_over)
    fit(first, 2, max_epochs=1, **options).save_checkpoint(tmp_path / "two.ckpt")
    trainer = fit(second, 2, tmp_path / "two.ckpt", max_epochs=2, **options)
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    assert len(moved) == (1 + 2) * 3 * len(list(second.parameters())), "when it ends, and after loading"
    assert len(whole.losses) == 4
    assert first.losses + second.losses == whole.losses
    saved = torch.load(tmp_path / "four.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    for number, (name, p) in enumerate(whole.named_parameters()):
        assert_same_bits(second.get_parameter(name).detach(), p.detach(), name)
        assert set(saved[number]) == set(whole.opt.state[p])
        for key, value in whole.opt.state[p].items():
            assert_same_bits(saved[number][key], value, f"{key} of {name}")
    for module in (whole, first, second):
        module.opt.close()
