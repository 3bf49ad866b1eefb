"""What the experiments on convergence have in common: their options, and runs, plan and report behind these."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from experiments.curves import kept
from experiments.curves.run import Run
from zofftk.errors import InputError

Report = Callable[[Sequence[dict[str, Any]]], list[str]]
QUICK = "quick"  # a folder of its own, so that trying out leaves the kept records alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan", action="store_true", help="list the runs with their minutes and what is done, no more"
    )
    parser.add_argument("--report", action="store_true", help="print what the records there say, no more")
    parser.add_argument("--fresh", action="store_true", help="make runs again that have a record or a checkpoint")
    parser.add_argument("--quick", action="store_true", help="tiny models and a few steps: that everything works")
    parser.add_argument("--workers", type=int, help="runs at a time (default: the usable cores)")
    parser.add_argument("--only", metavar="TEXT", help="runs with this in their name")


def carry_out(parts: Sequence[tuple[Sequence[Run], Report]], options: argparse.Namespace) -> int:
    """Interrupted runs go on where they were; 130 says that this was interrupted too."""
    try:
        return _carry_out(parts, options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _carry_out(parts: Sequence[tuple[Sequence[Run], Report]], options: argparse.Namespace) -> int:
    from experiments.curves.pool import describe_plan, train_all, usable_workers

    workers = usable_workers() if options.workers is None else options.workers
    if workers < 1:
        raise InputError(f"--workers: expected at least 1, got {workers}")
    chosen = [run for runs, _ in parts for run in runs if options.only is None or options.only in run.name]
    if not chosen:
        raise InputError(f"--only: expected a part of a run's name, got {options.only}; --plan lists the names")
    if options.plan:
        print("\n".join(describe_plan(chosen, workers=workers)))
        return 0
    if not options.report:
        if options.fresh:
            for run in chosen:
                kept.forget(run)
        if not train_all(chosen, workers=workers):
            return 130
    for runs, report in parts:
        records = [record for run in runs if (record := kept.load_record(run)) is not None]
        print("\n".join(report(records) if records else [f"no records of {runs[0].experiment} yet"]))
    return 0


def folder(experiment: str, *, quick: bool) -> str:
    return f"{QUICK}/{experiment}" if quick else experiment
