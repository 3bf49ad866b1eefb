"""Throughput of each GPU with 1 to 128 of them, 10 billion parameters, against the paper's Figure 11."""

from __future__ import annotations

import argparse
from functools import partial

from experiments.bars.bar import Bar, Counts, Step
from experiments.bars.command import add_arguments, predict_figure
from experiments.bars.micro_batches import halves, largest
from zofftk.baselines.prediction import OWN

FIGURE = "fig11"
SIZE = 10
GPUS = (1, 2, 4, 8, 16, 32, 64, 128)
SYSTEMS = {"ZeRO-2": "zero2", "ZeRO-Offload": "zero-offload-2020", OWN: OWN}
MOST_MICRO_BATCH = 32
ASSUMPTIONS = (
    f"micro-batch: the largest power of two that fits, at most {MOST_MICRO_BATCH}",
    "accumulation: see the calibration's table",
)


def bars(counts: Counts) -> list[Bar]:
    return [
        Bar(FIGURE, printed, "gpus", str(gpus), partial(_steps, system, gpus, counts[FIGURE]), ours=system == OWN)
        for printed, system in SYSTEMS.items()
        for gpus in GPUS
    ]


def _steps(system: str, gpus: int, micro_batches: int) -> tuple[Step, ...]:
    micro_batch = largest(system, SIZE, gpus, 1, halves(MOST_MICRO_BATCH))
    return () if micro_batch is None else (Step(system, SIZE, gpus, 1, micro_batch, micro_batches),)


def run(options: argparse.Namespace) -> int:
    return predict_figure(FIGURE, bars, ASSUMPTIONS, options)


__all__ = ["add_arguments", "bars", "run"]
