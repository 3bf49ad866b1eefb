"""What the paper does not show: the delay at several learning rates, without its warm-up, with AdamW, SGD and Lion.

A GPT-2-like model of 0.7 M parameters on short sequences, so that there is time for three seeds of every setting. The
learning rate itself warms up over the first 20 steps in all of them.
"""

import argparse

from experiments.curves import command
from experiments.curves.report import report_sweep
from experiments.curves.run import PAPER_DELAY_AFTER, Run

EXPERIMENT = "convergence_sweep"
SEEDS = (0, 1, 2)
# From too small to too large.
RATES = {"AdamW": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "SGD": (0.03, 0.1, 0.3), "Lion": (1e-4, 3e-4, 1e-3)}
UPDATES = (("synchronous", None), ("delayed", PAPER_DELAY_AFTER), ("delayed", 0))

add_arguments = command.add_arguments


def run(options: argparse.Namespace) -> int:
    return command.carry_out([(runs(quick=options.quick), report_sweep)], options)


def runs(*, quick: bool) -> list[Run]:
    """AdamW, of which the claim is, comes first; with each seed the table is whole."""
    seeds, count = (SEEDS[:1], 1) if quick else (SEEDS, None)
    return [
        make(optimizer, lr, update, delay_after, seed, quick=quick)
        for optimizer, rates in RATES.items()
        for seed in seeds
        for lr in rates[:count]
        for update, delay_after in UPDATES
    ]


def make(optimizer: str, lr: float, update: str, delay_after: int | None, seed: int, *, quick: bool) -> Run:
    return Run(
        experiment=command.folder(EXPERIMENT, quick=quick),
        task="gpt",
        model="quick" if quick else "0.7m",
        optimizer=optimizer,
        update=update,
        delay_after=delay_after,
        lr=lr,
        seed=seed,
        steps=6 if quick else 400,
        batch_size=4 if quick else 16,
        evaluate_every=3 if quick else 40,
    )
