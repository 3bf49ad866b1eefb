"""GPT-2-like models from scratch: plain, offloaded synchronously, and delayed after 40 steps (the paper's Fig. 12).

1.3 M parameters for three seeds, and one run of 10.5 M for the picture. Each run is resumable and leaves a record.
"""

import argparse

from experiments.curves import command
from experiments.curves.report import report_pretraining
from experiments.curves.run import PAPER_DELAY_AFTER, Run

EXPERIMENT = "convergence_gpt"
SEEDS = (0, 1, 2)
LR = {"1.3m": 3e-3, "10.5m": 1e-3, "quick": 1e-2}
STEPS = {"1.3m": 2000, "10.5m": 1400, "quick": 12}
UPDATES = (("synchronous", None), ("delayed", PAPER_DELAY_AFTER))

add_arguments = command.add_arguments


def run(options: argparse.Namespace) -> int:
    return command.carry_out([(runs(quick=options.quick), report_pretraining)], options)


def runs(*, quick: bool) -> list[Run]:
    """First what proves most; a second plain run would say nothing new of what is the same bits."""
    if quick:
        kinds = [("plain", None), ("torch", None), ("synchronous", None), ("delayed", 4)]
        return [make("quick", update, delay_after, seed) for seed in SEEDS[:2] for update, delay_after in kinds]
    small = [make("1.3m", "plain", None, 0)]
    small += [make("1.3m", update, delay_after, seed) for seed in SEEDS for update, delay_after in UPDATES]
    picture = [make("10.5m", update, delay_after, 0) for update, delay_after in UPDATES]
    return [*small, *picture, make("1.3m", "torch", None, 0)]


def make(model: str, update: str, delay_after: int | None, seed: int) -> Run:
    quick = model == "quick"
    return Run(
        experiment=command.folder(EXPERIMENT, quick=quick),
        task="gpt",
        model=model,
        optimizer="AdamW",
        update=update,
        delay_after=delay_after,
        lr=LR[model],
        seed=seed,
        steps=STEPS[model],
        batch_size=8,
        evaluate_every=6 if quick else 100,
    )
