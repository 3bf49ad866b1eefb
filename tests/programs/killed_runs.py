"""Training runs that save every step, and go on from the newest checkpoint in their folder, if there is one.

Each says in one number how it has ended: the bits of parameters, states and losses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zofftk
from zofftk.checkpoint import load_checkpoint
from zofftk.cli import main

STEPS = 10


def newest(folder: Path) -> Path | None:
    return max(folder.glob("*.pt"), default=None)


def by_command(folder: Path, *options: str) -> str:
    """`zofftk train --save-every 1`, then `--resume`."""
    path, text = folder / "run.pt", folder / "text.py"
    begun = len(list(folder.glob("out/*")))
    kept = ["--save-every", "1", "--save", path, "--out", folder / "out", "--name", f"part {begun}"]
    command: list[Any] = ["train", "--preset", "tiny", "--data", text, "--steps", STEPS]
    command += ["--batch-size", 2, "--seq-len", 16, *options]
    if path.exists():
        command = ["train", "--resume", path]
    else:
        text.write_text("".join(f"def f{i}(x):\n    return x * {i}\n\n" for i in range(50)))
    if not path.exists() or load_checkpoint(path).step < STEPS:
        assert main([str(word) for word in [*command, *kept]]) == 0
    end = load_checkpoint(path)
    losses = [[sample["loss"], sample["lr"], sample["grad_norm"]] for sample in end.samples]
    return digest([end.step, end.model, end.optimizer, end.schedule, losses])  # not the times in the samples


@dataclass(frozen=True)
class Script:
    """A training script of a user's."""

    kind: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    is_handed_over: bool = False
    is_one_file: bool = False

    def __call__(self, folder: Path) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 800), nn.Tanh(), nn.Linear(800, 48)).to(self.dtype)
        opt = self.kind(model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=1.0, **self.options)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
        if self.is_handed_over:
            zofftk.offload(model, opt)
        parts = {"model": model, "optimizer": opt, "schedule": schedule}
        losses: list[float] = []
        if (path := newest(folder)) is not None:
            saved = zofftk.load(path)
            losses = saved["losses"]
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        while len(losses) < STEPS:
            opt.zero_grad()
            loss = loss_of(model, len(losses), self.dtype)
            opt.scale_loss(loss).backward()
            opt.step()
            schedule.step()
            losses.append(loss.item())
            path = folder / ("run.pt" if self.is_one_file else f"step {len(losses):04}.pt")
            zofftk.save(path, {"losses": losses} | {name: part.state_dict() for name, part in parts.items()})
        opt.flush()
        states = opt.state_dict()["state"]  # in `delayed`, nothing is left
        end = digest([losses, model.state_dict(), states, schedule.state_dict()])
        opt.close()
        return end


def loss_of(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(step)).to(dtype)
    return model(x).float().square().mean() * (1 + step % 3)


def digest(value: Any) -> str:
    """Equal for equal bits alone."""
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=repr):
                add([key, value[key]])
        elif isinstance(value, list | tuple):
            sha.update(f"{len(value)} of:".encode())
            for item in value:
                add(item)
        elif isinstance(value, torch.Tensor):
            sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
            sha.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(value).encode())

    add(value)
    return sha.hexdigest()


def late(after: int) -> dict[str, Any]:
    return {"update": "delayed", "delay_after": after}


RUNS: dict[str, Callable[[Path], str]] = {
    "zofftk train": by_command,
    "zofftk train, delayed": lambda folder: by_command(folder, "--update", "delayed", "--delay-after", "2"),
    "delayed AdamW": Script(zofftk.OffloadAdamW, {"backwards_per_step": 1, **late(2)}, is_handed_over=True),
    "delayed AdamW in one file": Script(zofftk.OffloadAdamW, late(0), is_one_file=True),
    "Lion in one file": Script(zofftk.OffloadLion, is_handed_over=True, is_one_file=True),
    "delayed SGD": Script(zofftk.OffloadSGD, {"momentum": 0.9, **late(1)}, dtype=torch.float32),
    "delayed Adam in fp16": Script(
        zofftk.OffloadAdam,
        {"loss_scale": zofftk.LossScale(initial=2.0**22, growth_interval=2), **late(1)},
        dtype=torch.float16,
        is_handed_over=True,
        is_one_file=True,
    ),
}
