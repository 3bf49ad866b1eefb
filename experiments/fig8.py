"""Throughput on one GPU by size of model, against the paper's Figure 8."""

from __future__ import annotations

import argparse
from functools import partial

from experiments.bars.bar import Bar, Counts, Step
from experiments.bars.command import add_arguments, predict_figure
from experiments.bars.micro_batches import largest, tiles
from zofftk.baselines.prediction import OWN
from zofftk.presets import TABLE_3

FIGURE = "fig8"
TOTAL_BATCH = 512
# What the figure calls a system: what we call it, and the sizes it has bars for.
SYSTEMS = {
    "PyTorch": ("ddp", (1, 2)),
    "SwapAdvisor": ("swapadvisor", (1, 2, 4, 6, 8)),
    "L2L": ("l2l", (1, 2, 4, 6, 8, 10, 11, 12, 13)),
    "ZeRO-Offload": ("zero-offload-2020", (1, 2, 4, 6, 8, 10, 11, 12, 13)),
    OWN: (OWN, (1, 2, 4, 6, 8, 10, 11, 12, 13)),
}
ASSUMPTIONS = (
    "one GPU, 512 samples a step by accumulation",
    "micro-batch: Table 3's, or where that does not fit the largest multiple of 8 that does, or 4, 2, 1",
)


def bars(counts: Counts) -> list[Bar]:
    return [_bar(printed, system, size) for printed, (system, sizes) in SYSTEMS.items() for size in sizes]


def _bar(printed: str, system: str, size: int) -> Bar:
    return Bar(FIGURE, printed, "params", f"{size}B", partial(_steps, system, size), ours=system == OWN)


def _steps(system: str, size: int) -> tuple[Step, ...]:
    micro_batch = largest(system, size, 1, 1, tiles(TABLE_3[f"{size}b"][2]))
    return () if micro_batch is None else (Step(system, size, 1, 1, micro_batch, round(TOTAL_BATCH / micro_batch)),)


def run(options: argparse.Namespace) -> int:
    return predict_figure(FIGURE, bars, ASSUMPTIONS, options)


__all__ = ["add_arguments", "bars", "run"]
