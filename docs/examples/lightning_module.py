"""Lightning with its optimizer on the CPU: return it from `configure_optimizers`.

`gradient_clip_val` (by norm; by value is refused), `accumulate_grad_batches`, the precision plugins and checkpoints
work as with `torch.optim.AdamW`.
"""

from __future__ import annotations

import logging
import warnings

import lightning
import torch

from zofftk import OffloadAdamW

warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`")  # Lightning's own, on torch 2.13
warnings.filterwarnings("ignore", ".*does not have many workers")


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = (self.layers(inputs) - targets).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OffloadAdamW(self.parameters(), lr=3e-3)


def train(epochs: int = 4) -> list[float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = Regression()
    inputs = torch.randn(128, 32)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1].sin())
    trainer = lightning.Trainer(
        precision="bf16-true",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    batches = len(model.losses) // epochs
    return [sum(model.losses[i : i + batches]) / batches for i in range(0, len(model.losses), batches)]


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
