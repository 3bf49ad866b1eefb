"""Throughput with the delayed update and without, on one GPU, against the paper's Figure 9."""

from __future__ import annotations

import argparse
from functools import partial

from experiments.bars.bar import Bar, Counts, Step
from experiments.bars.command import add_arguments, predict_figure
from zofftk.baselines.prediction import OWN

FIGURE = "fig9"
SIZES = (2, 6, 8, 10)
MICRO_BATCH = 8
OURS = f"{OWN} without DPU", f"{OWN} with DPU"
ASSUMPTIONS = ("one GPU, micro-batch 8, as the text says", "accumulation: see the calibration's table")


def bars(counts: Counts) -> list[Bar]:
    found = []
    for size in SIZES:
        for printed, options in (("without DPU", ()), ("with DPU", (("delayed", True),))):
            choose = partial(_steps, "zero-offload-2020", size, counts[FIGURE], options)
            found.append(Bar(FIGURE, printed, "params", f"{size}B", choose))
        for ours, options in zip(OURS, ((), (("update", "delayed"), ("delay_after", 1))), strict=True):
            choose = partial(_steps, OWN, size, counts[FIGURE], options)
            found.append(Bar(FIGURE, ours, "params", f"{size}B", choose, ours=True))
    return found


def _steps(system: str, size: int, micro_batches: int, options: tuple[tuple[str, object], ...]) -> tuple[Step, ...]:
    return (Step(system, size, 1, 1, MICRO_BATCH, micro_batches, options),)


def run(options: argparse.Namespace) -> int:
    return predict_figure(FIGURE, bars, ASSUMPTIONS, options)


__all__ = ["add_arguments", "bars", "run"]
