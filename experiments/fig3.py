"""Figure 3: a step on one GPU, as the engine's streams ran it on the virtual device."""

import argparse
from dataclasses import asdict
from typing import Any

from experiments.record import keep
from experiments.rehearsed_steps import Rehearsed, first_ms, last_ms, of_step, overlap_ms, total_ms
from experiments.rows import row
from zofftk.whole_number import at_least_1

FULL = Rehearsed(model="1b", profile="v100-dgx2", micro_batch=8, bucket_bytes=128 << 20, steps=3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--micro-batch", type=at_least_1, default=FULL.micro_batch, help=f"default: {FULL.micro_batch}")


def run(options: argparse.Namespace) -> int:
    rehearsed = Rehearsed(**asdict(FULL) | {"micro_batch": options.micro_batch})
    spans, steps = rehearsed.run()
    shown, following = steps[-2], steps[-1]
    checks, shares = examine(spans, shown, following)
    for says, holds in checks.items():
        print(f"{'yes' if holds else 'NO':4}{says}")
    rows = [row("zofftk", "share", name, value, "%", "simulated") for name, value in shares.items()]
    for each in rows:
        print(f"{each['x']:60}{each['value']:7.1f} %")
    within = [span for span in spans if shown["start_ms"] <= span["start_ms"] < following["stop_ms"]]
    results = {"rows": rows, "checks": checks, "spans": within, "steps": [shown, following]}
    print("record:", keep("fig3", asdict(rehearsed), None, results))
    return 0


def examine(
    spans: list[dict[str, Any]], step: dict[str, float], following: dict[str, float]
) -> tuple[dict[str, bool], dict[str, float]]:
    """What the paper's drawing says of the order of things, and how much is hidden."""
    backward, down = of_step(spans, step, "backward"), of_step(spans, step, "gradients down")
    update, up = of_step(spans, step, "update"), of_step(spans, step, "values up")
    forward = of_step(spans, following, "forward")
    checks = {
        "gradients go down while backward runs": first_ms(down) < last_ms(backward),
        "the last of them arrives after backward": last_ms(down) >= last_ms(backward),
        "the update begins after backward": first_ms(update) >= last_ms(backward),
        "values go up while the update runs": first_ms(up) < last_ms(update),
        "the next forward begins after the last of them": first_ms(forward) >= last_ms(up),
    }
    shares = {
        "gradients on the link beside backward": 100 * overlap_ms(down, backward) / total_ms(down),
        "values on the link beside the update": 100 * overlap_ms(up, update) / total_ms(up),
        "step in forward and backward": 100
        * total_ms([*of_step(spans, step, "forward"), *backward])
        / (step["stop_ms"] - step["start_ms"]),
    }
    return checks, shares
