"""Fine-tuning a pre-trained BERT on labelled text, with the delay and without it (the paper's Fig. 13).

all-MiniLM-L6-v2 (22.7 M parameters) learns to tell which subpackage the opening of a docstring is from. The paper's
BERT-large and SQuAD are beyond what can be had and trained without a network and a GPU.
"""

import argparse

from experiments.curves import command
from experiments.curves.report import report_finetuning
from experiments.curves.run import PAPER_DELAY_AFTER, Run

EXPERIMENT = "convergence_bert"
SEEDS = (0, 1, 2)
UPDATES = (("synchronous", None), ("delayed", PAPER_DELAY_AFTER), ("delayed", 0))

add_arguments = command.add_arguments


def run(options: argparse.Namespace) -> int:
    return command.carry_out([(runs(quick=options.quick), report_finetuning)], options)


def runs(*, quick: bool) -> list[Run]:
    """Seed by seed, so that an interruption leaves whole comparisons."""
    seeds, updates = (SEEDS[:1], UPDATES[::2]) if quick else (SEEDS, UPDATES)
    return [make(update, delay_after, seed, quick=quick) for seed in seeds for update, delay_after in updates]


def make(update: str, delay_after: int | None, seed: int, *, quick: bool) -> Run:
    return Run(
        experiment=command.folder(EXPERIMENT, quick=quick),
        task="bert",
        model="quick" if quick else "minilm",
        optimizer="AdamW",
        update=update,
        delay_after=delay_after,
        lr=3e-4,
        seed=seed,
        steps=3 if quick else 600,
        batch_size=16,
        evaluate_every=3 if quick else 100,
    )
