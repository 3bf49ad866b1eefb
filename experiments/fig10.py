"""Throughput of each of 16 GPUs by size of model, against the paper's Figure 10."""

from __future__ import annotations

import argparse
from functools import partial

from experiments.bars.bar import Bar, Counts, Step
from experiments.bars.command import add_arguments, predict_figure
from experiments.bars.micro_batches import MOST_SLICES, halves, largest
from zofftk.baselines.prediction import OWN

FIGURE = "fig10"
GPUS = 16
TOTAL_BATCH = 512
MOST_MICRO_BATCH = 64
CUTS = tuple(slices for slices in (1, 2, 4, 8, 16) if slices <= MOST_SLICES)
# What the figure calls a system: what we call it, how many slices it may have, and the sizes it has bars for.
SYSTEMS = {
    "PyTorch": ("ddp", (1,), (1, 2)),
    "ZeRO-2": ("zero2", (1,), (1, 2, 8, 10)),
    "Megatron": ("megatron", CUTS[1:], (1, 2, 8, 10, 13, 15, 20)),
    "ZeRO-Offload": ("zero-offload-2020", (1,), (1, 2, 8, 10, 13, 15)),
    "ZeRO-Offload with MP": ("zero-offload-2020", CUTS[1:], (15, 20, 40, 60, 70)),
    OWN: (OWN, (1,), (1, 2, 8, 10, 13, 15)),
    f"{OWN} with MP": (OWN, CUTS[1:], (15, 20, 40, 60, 70)),
}
ASSUMPTIONS = (
    "16 GPUs of one DGX-2, 512 samples a step over all of them, by accumulation",
    f"micro-batch: the largest power of two that fits, at most {MOST_MICRO_BATCH}, and a rank's part of the 512",
    f"model parallelism: the fastest of 2, 4, 8 slices (at most {MOST_SLICES}, as in Figure 7) that fit",
)


def bars(counts: Counts) -> list[Bar]:
    return [
        Bar(FIGURE, printed, "params", f"{size}B", partial(_steps, system, cuts, size), ours=system == OWN)
        for printed, (system, cuts, sizes) in SYSTEMS.items()
        for size in sizes
    ]


def _steps(system: str, cuts: tuple[int, ...], size: int) -> tuple[Step, ...]:
    steps = []
    for slices in cuts:
        ranks = GPUS // slices
        most = min(MOST_MICRO_BATCH, TOTAL_BATCH // ranks)
        micro_batch = largest(system, size, ranks, slices, halves(most))
        if micro_batch is not None:
            steps.append(Step(system, size, ranks, slices, micro_batch, TOTAL_BATCH // ranks // micro_batch))
    return tuple(steps)


def run(options: argparse.Namespace) -> int:
    return predict_figure(FIGURE, bars, ASSUMPTIONS, options)


__all__ = ["add_arguments", "bars", "run"]
