"""What each part of ZeRO-Offload brings, 1 billion parameters on one GPU, against the paper's Figure 14."""

from __future__ import annotations

import argparse
from functools import partial

from experiments.bars.bar import Bar, Counts, Step
from experiments.bars.command import add_arguments, predict_figure
from experiments.bars.micro_batches import fits
from zofftk.baselines.prediction import OWN

FIGURE = "fig14"
SIZE = 1
BATCHES = (1, 2, 4, 6, 8, 16, 32)
SYSTEMS = {
    "PyTorch": ("ddp", ()),
    "Offload + PT-CPU Adam": ("offload-torch-cpu", ()),
    "Offload + CPU-Adam": ("zero-offload-2020", ()),
    "Offload + CPU-Adam + DPU": ("zero-offload-2020", (("delayed", True),)),
    OWN: (OWN, ()),
    f"{OWN} delayed": (OWN, (("update", "delayed"), ("delay_after", 1))),
}
ASSUMPTIONS = (
    "one GPU; a batch is one micro-batch, and all systems and batches accumulate the same number of them",
    "accumulation: see the calibration's table",
)


def bars(counts: Counts) -> list[Bar]:
    return [
        Bar(
            FIGURE,
            printed,
            "batch",
            str(batch),
            partial(_steps, system, batch, counts[FIGURE], options),
            ours=system == OWN,
        )
        for printed, (system, options) in SYSTEMS.items()
        for batch in BATCHES
    ]


def _steps(system: str, batch: int, micro_batches: int, options: tuple[tuple[str, object], ...]) -> tuple[Step, ...]:
    if not fits(system, SIZE, 1, 1, batch):
        return ()
    return (Step(system, SIZE, 1, 1, batch, micro_batches, options),)


def run(options: argparse.Namespace) -> int:
    return predict_figure(FIGURE, bars, ASSUMPTIONS, options)


__all__ = ["add_arguments", "bars", "run"]
