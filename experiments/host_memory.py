"""Peak host memory of ten steps with the engine, less that of the same steps whose gradients are dropped on arrival.

What is left is the engine's own: states, host gradients and staging. Each side runs in a process of its own, since a
process keeps its peak.
"""

import argparse
import json
import subprocess
import sys
from contextlib import closing
from typing import Any

import torch

from experiments.record import keep
from experiments.verdict import verdict
from zofftk.data import load_corpus
from zofftk.gpt import build_gpt
from zofftk.process_memory import peak_bytes
from zofftk.train import build_optimizer
from zofftk.train_config import TrainConfig

STATE_BYTES_PER_PARAM = 14
ALLOWED = 1.10
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="24m", help="model, batch and length (default: 24m)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each side (default: 10)")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side (default: 3)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    config = TrainConfig.from_options({"preset": options.preset, "steps": options.steps})
    if options.side:
        print(json.dumps(SIDES[options.side](config)))
        return 0
    # The text is encoded and cached first, so that neither side pays for it.
    load_corpus(None, vocab=config.model.vocab, seq=config.seq_len)
    samples = {side: [in_child(side, options) for _ in range(options.repeats)] for side in SIDES}
    results = compare(samples)
    for name, value in results.items():
        print(f"{name:24}{value / MIB:10.1f} MiB" if name.endswith("_bytes") else f"{name:24}{value:10,.2f}")
    met = results["added_over_needed"] <= ALLOWED
    print(f"required: added_bytes at most {ALLOWED:.2f} of needed_bytes: {verdict(met, timed=False)}")
    print("record:", keep("host_memory", vars(config), samples, results))
    return 0 if met else 1


def compare(samples: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    engine = max(sample["peak_bytes"] for sample in samples["zofftk"])
    dropped = min(sample["peak_bytes"] for sample in samples["dropped"])
    num_params = samples["zofftk"][0]["num_params"]
    staging = samples["zofftk"][0]["staging_bytes"]
    needed = STATE_BYTES_PER_PARAM * num_params + staging
    return {
        "num_params": num_params,
        "zofftk_peak_bytes": engine,
        "dropped_peak_bytes": dropped,
        "added_bytes": engine - dropped,
        "states_bytes": STATE_BYTES_PER_PARAM * num_params,
        "staging_bytes": staging,
        "needed_bytes": needed,
        "added_over_needed": (engine - dropped) / needed,
    }


def in_child(side: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "experiments", "host_memory", "--side", side]
    command += ["--preset", options.preset, "--steps", str(options.steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def with_engine(config: TrainConfig) -> dict[str, Any]:
    model = build_gpt(config.model, seed=0, dtype=torch.bfloat16)
    with closing(build_optimizer(model, config)) as optimizer:
        run_steps(model, config, optimizer)
        report = vars(optimizer.report())
    return {"peak_bytes": peak_bytes(), "num_params": report["num_params"], "staging_bytes": report["staging_bytes"]}


def with_gradients_dropped(config: TrainConfig) -> dict[str, Any]:
    model = build_gpt(config.model, seed=0, dtype=torch.bfloat16)

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)
    run_steps(model, config, optimizer=None)
    return {"peak_bytes": peak_bytes()}


def run_steps(model: torch.nn.Module, config: TrainConfig, optimizer: torch.optim.Optimizer | None) -> None:
    corpus = load_corpus(None, vocab=config.model.vocab, seq=config.seq_len)
    for step in range(config.steps):
        ids, targets = corpus.batch(seed=0, step=step, batch_size=config.batch_size, seq=config.seq_len)
        model(ids, targets).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


SIDES = {"zofftk": with_engine, "dropped": with_gradients_dropped}
