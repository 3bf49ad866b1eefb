"""The delay by optimizer and learning rate, which the paper does not show, from the records of `convergence_sweep`."""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

from experiments import convergence_sweep, loss_curves
from experiments.curves.analysis import mean_and_sd
from experiments.curves.report import BySeed, Record, against, by_config, by_update, each, held_out_loss, report_sweep
from experiments.record import keep
from experiments.rows import row

DIVERGED = "diverged"

add_arguments = loss_curves.add_arguments


def run(options: argparse.Namespace) -> int:
    records = loss_curves.gather(convergence_sweep, options)
    settings = list(settings_of(records))
    report = report_sweep(records)
    print("\n".join(report))
    results = {"rows": [final_row(*setting) for setting in settings], "differences": differences_of(settings)}
    config = loss_curves.counted(convergence_sweep, records) | {"made on": records[0].get("hardware")}
    print("record:", keep("delay_rates", config, None, results | {"report": report}))
    return 0


Setting = tuple[str, float, str, dict[str, BySeed]]  # optimizer, learning rate, update, and all updates at this rate


def settings_of(records: Sequence[Record]) -> Iterator[Setting]:
    for (optimizer, lr), alike in sorted(by_config(records, "optimizer", "lr").items()):
        groups = by_update(alike)
        yield from ((optimizer, lr, update, groups) for update in groups)


def final_row(optimizer: str, lr: float, update: str, groups: dict[str, BySeed]) -> dict[str, Any]:
    mean, sd = mean_and_sd(list(each(groups[update], held_out_loss).values()))
    value = mean if math.isfinite(mean) else DIVERGED
    more = {"optimizer": optimizer, "update": update, "seeds": len(groups[update])}
    return row(f"{optimizer}, {update}", "lr", f"{lr:g}", value, "nats", "measured", sd=sd, **more)


def differences_of(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """From the synchronous update with the same seeds, in held-out loss and in standard deviations over its seeds."""
    return [
        {"optimizer": optimizer, "lr": lr, "update": update, "seeds": found.seeds, "mean": found.mean}
        | {"in_seed_sds": found.in_seed_sds}
        for optimizer, lr, update, groups in settings
        if (found := against(groups, update, held_out_loss)) is not None
    ]
