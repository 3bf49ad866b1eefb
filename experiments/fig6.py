"""Figure 6: the delayed update, from its last synchronous step on, as the engine's streams ran it."""

import argparse
from dataclasses import asdict
from typing import Any

from experiments.record import keep
from experiments.rehearsed_steps import Rehearsed, first_ms, last_ms, of_step, overlap_ms, total_ms
from experiments.rows import row

DELAY_AFTER = 2
FULL = Rehearsed(model="1b", profile="v100-dgx2", micro_batch=2, bucket_bytes=128 << 20, steps=DELAY_AFTER + 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--micro-batch", type=int, default=FULL.micro_batch, help=f"default: {FULL.micro_batch}")


def run(options: argparse.Namespace) -> int:
    rehearsed = Rehearsed(**asdict(FULL) | {"micro_batch": options.micro_batch})
    # The paper's order: a late value goes up behind its parameter's gradient, inside backward.
    spans, steps = rehearsed.run(update="delayed", delay_after=DELAY_AFTER, backwards_per_step=1)
    synchronous, first, late = steps[DELAY_AFTER - 1 : DELAY_AFTER + 2]
    checks = examine(spans, first, late)
    for says, holds in checks.items():
        print(f"{'yes' if holds else 'NO':4}{says}")
    took = {
        "last synchronous step": synchronous,
        "first step whose update is late": first,
        "step with a late update": late,
    }
    rows = [
        row("zofftk", "step", name, step["stop_ms"] - step["start_ms"], "ms", "simulated")
        for name, step in took.items()
    ]
    for each in rows:
        print(f"{each['x']:60}{each['value']:9.1f} ms")
    within = [span for span in spans if synchronous["start_ms"] <= span["start_ms"] < late["stop_ms"]]
    results = {"rows": rows, "checks": checks, "spans": within, "steps": [synchronous, first, late]}
    print("record:", keep("fig6", asdict(rehearsed) | {"delay_after": DELAY_AFTER}, None, results))
    return 0


def examine(spans: list[dict[str, Any]], first: dict[str, float], late: dict[str, float]) -> dict[str, bool]:
    model, backward = of_step(spans, late, "forward", "backward"), of_step(spans, late, "backward")
    update, copies = of_step(spans, late, "update"), of_step(spans, late, "copy back")
    return {
        "in the first step of the delay nothing goes up": not of_step(spans, first, "values up"),
        "in the next, the update runs beside forward and backward": overlap_ms(update, model) > 0.9 * total_ms(update),
        "parameters take their values inside backward, and the last of them after it": first_ms(copies)
        < last_ms(backward)
        <= last_ms(copies),
    }
