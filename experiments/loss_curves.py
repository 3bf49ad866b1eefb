"""Figures 12 and 13 from the records of training runs: curves, final values and what separates them.

Where there is no record of the long runs, a quick setting makes short ones; otherwise it is said what to run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from experiments.curves import kept
from experiments.curves.analysis import first_difference, mean_and_sd, smoothed
from experiments.curves.command import QUICK
from experiments.curves.report import SMOOTHED_SHARE, BySeed, Record, against, by_config, by_update, each, losses
from experiments.rows import row
from zofftk.errors import InputError

MOST_POINTS = 200  # of a curve that is drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="short runs, where there are no records of the long ones")
    parser.add_argument(
        "--fresh", action="store_true", help="make the long runs again, about half an hour on two cores"
    )


def gather(experiment: ModuleType, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records there are; InputError where there are none."""
    if options.fresh:
        _train(experiment, ["--fresh"])
    records = _records(experiment, quick=False)
    if not records and options.quick:
        _train(experiment, ["--quick"])
        records = _records(experiment, quick=True)
    if not records:
        raise InputError(f"expected records of training runs: make them with python -m experiments {_name(experiment)}")
    if missing := counted(experiment, records)["missing"]:
        print(f"without {missing} runs: python -m experiments {_name(experiment)} makes them")
    return records


def counted(experiment: ModuleType, records: Sequence[Record]) -> dict[str, int]:
    """How many training runs there are, and how many more there should be; an item without them all is not finished."""
    is_quick = records[0]["config"]["experiment"].startswith(QUICK)
    return {"records": len(records), "missing": len(experiment.runs(quick=is_quick)) - len(records)}


def _name(experiment: ModuleType) -> str:
    return experiment.__name__.rpartition(".")[2]


def _train(experiment: ModuleType, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    experiment.add_arguments(parser)
    code = experiment.run(parser.parse_args(arguments))
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise InputError(f"expected training runs that end well: python -m experiments {_name(experiment)} shows more")


def _records(experiment: ModuleType, *, quick: bool) -> list[dict[str, Any]]:
    return [found for run in experiment.runs(quick=quick) if (found := kept.load_record(run)) is not None]


def summarise(
    records: Sequence[Record], measures: Mapping[str, Callable[[Record], float]], **units: str
) -> dict[str, Any]:
    """By model, update and measure: means over the seeds, and differences from the synchronous update."""
    rows, curves, differences, equal = [], [], [], []
    for (model,), alike in by_config(records, "model").items():
        groups = by_update(alike)
        for label, group in groups.items():
            curves.append({"model": model, "update": label} | mean_curve(group))
            for name, measure in measures.items():
                mean, sd = mean_and_sd(list(each(group, measure).values()))
                unit = units.get(name, "loss")
                rows.append(row(f"{model}, {label}", "final", name, mean, unit, "measured", sd=sd, seeds=len(group)))
                if (found := against(groups, label, measure)) is not None:
                    differences.append(
                        {"model": model, "update": label, "measure": name, "seeds": found.seeds, "mean": found.mean}
                        | {"seed_sd": found.seed_sd, "in_seed_sds": found.in_seed_sds}
                    )
        equal += [{"model": model} | pair for pair in same_bits(groups)]
    return {"rows": rows, "curves": curves, "differences": differences, "equal": equal}


def mean_curve(group: BySeed) -> dict[str, Any]:
    """Of all seeds, smoothed, and no denser than it is drawn."""
    steps = min(len(losses(record)) for record in group.values())
    window = max(1, round(SMOOTHED_SHARE * steps))
    mean = np.mean([smoothed(losses(record)[:steps], window) for record in group.values()], axis=0)
    places = np.unique(np.linspace(0, len(mean) - 1, min(MOST_POINTS, len(mean))).round().astype(int))
    middle = (window + 1) // 2
    return {
        "seeds": len(group),
        "smoothed_over": window,
        "step": [int(place) + middle for place in places],
        "loss": [round(float(mean[place]), 5) for place in places],
    }


def same_bits(groups: Mapping[str, BySeed]) -> list[dict[str, Any]]:
    """Of the run without the engine and the synchronous one, the first step whose losses differ, if any."""
    plain, offloaded = groups.get("plain", {}), groups.get("synchronous", {})
    return [
        {
            "seed": seed,
            "steps": len(losses(plain[seed])),
            "first_difference": first_difference(losses(plain[seed]), losses(offloaded[seed])),
        }
        for seed in sorted(plain.keys() & offloaded.keys())
    ]
