"""Figure 5: a step of one of several ranks, bucket by bucket, as the engine's streams ran it on the virtual device.

The paper gives this schedule as a program. Here it is what the engine did.
"""

import argparse
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from experiments.record import keep
from experiments.rehearsed_steps import Rehearsed
from experiments.rows import row

FULL = Rehearsed(model="1b", profile="v100-dgx2", micro_batch=2, bucket_bytes=128 << 20, steps=3, ranks=4)
ORDER = ("pack", "reduce-scatter", "gradients down", "update", "values up", "all-gather", "copy back")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=FULL.ranks, help=f"default: {FULL.ranks}")


def run(options: argparse.Namespace) -> int:
    rehearsed = Rehearsed(**asdict(FULL) | {"ranks": options.ranks})
    spans, steps = rehearsed.run()
    shown, following = steps[-2], steps[-1]
    within = [span for span in spans if shown["start_ms"] <= span["start_ms"] < following["start_ms"]]
    stages = stages_of_buckets(within)
    checks = {
        "every bucket is packed, reduced, brought down, updated, brought up, gathered, copied back, in this order": all(
            list(times) == list(ORDER) and list(times.values()) == sorted(times.values()) for times in stages.values()
        ),
        "a rank brings down and up its own share alone": _is_own_share(within, options.ranks),
    }
    for says, holds in checks.items():
        print(f"{'yes' if holds else 'NO':4}{says}")
    rows = [
        row(f"bucket {bucket}", "stage begins", stage, start_ms - shown["start_ms"], "ms", "simulated")
        for bucket, times in sorted(stages.items())
        for stage, start_ms in times.items()
    ]
    results = {"rows": rows, "checks": checks, "spans": within, "steps": [shown]}
    print("record:", keep("fig5", asdict(rehearsed), None, results))
    return 0


def stages_of_buckets(spans: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """By bucket, when each of its stages first begins, in the order of the schedule."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for span in spans:
        _name, _, number = span["label"].partition(": bucket ")
        if number.strip().isdigit() and span["stage"] in ORDER:
            of_bucket = found[int(number)]
            of_bucket[span["stage"]] = min(span["start_ms"], of_bucket.get(span["stage"], span["start_ms"]))
    return {bucket: {stage: times[stage] for stage in ORDER if stage in times} for bucket, times in found.items()}


def _is_own_share(spans: list[dict[str, Any]], ranks: int) -> bool:
    """Each sends its share to all others, and brings it over the link once."""

    def total(stage: str) -> int:
        return sum(span["nbytes"] for span in spans if span["stage"] == stage and ": bucket " in span["label"])

    between = total("all-gather")
    return all(abs((ranks - 1) * total(stage) / between - 1) < 0.05 for stage in ("gradients down", "values up"))
