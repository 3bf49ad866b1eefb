"""Bytes and times of every rank on 1, 2 and 4 processes of this machine, against what each rank should need.

A rank of N brings k/N of its gradients down for k backwards a step and 1/N of the new values up, in the wire's dtype,
and keeps 14/N bytes a parameter on the host with a 16-bit wire. Beside these: the padding that gives all shards of a
bucket one length, and the words and norms that ranks tell each other over the link.
"""

import argparse
import os
import statistics
import tempfile
from typing import Any

import torch

from experiments.rank_worker import Task, run_on
from experiments.record import keep
from experiments.verdict import verdict

SIZES = (1, 2, 4)
REQUIRED_HOST = 1.02  # bytes of a rank's states and wire, over 14/N per parameter
REQUIRED_LINK = 1.01  # bytes of all ranks, over those of one; without padding, words and norms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    parser.add_argument("--width", type=int, default=1024, help="of a layer, which has width² weights (default: 1024)")
    parser.add_argument("--steps", type=int, default=6, help="after a first one that is not counted (default: 6)")
    parser.add_argument("--backwards", type=int, default=2, help="of a step (default: 2)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of ranks (default: 1 2 4)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: a GPU for each rank")


def run(options: argparse.Namespace) -> int:
    if options.backend == "nccl" and torch.cuda.device_count() < max(options.sizes):
        print(f"nccl needs {max(options.sizes)} GPUs, this machine has {torch.cuda.device_count()}")
        return 2
    task = Task(options.layers, options.width, options.steps, options.backwards, options.backend)
    samples: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            samples[str(size)] = run_on(size, task, os.path.join(folder, f"of {size}"))
    results = compare(samples, options.backwards)
    for name, value in results.items():
        print(f"{name:54}{value:12.3f}")
    of_hosts = [value for name, value in results.items() if name.startswith("host bytes per rank over")]
    of_links = [value for name, value in results.items() if name.startswith("link bytes of all ranks over")]
    hosts, links = max(of_hosts) <= REQUIRED_HOST, max(abs(value - 1) for value in of_links) <= REQUIRED_LINK - 1
    print("each rank is a process with one compute thread; their cores are shared where there are fewer than ranks")
    print(f"required: host bytes per rank at most {REQUIRED_HOST} of 14/N: {verdict(hosts, timed=False)}")
    print(f"required: total link bytes within {REQUIRED_LINK} of (2k+2): {verdict(links, timed=False)}")
    print("record:", keep("scaling_measured", vars(options) | {"run": ""}, samples, results))
    return 0 if hosts and links else 1


def compare(samples: dict[str, list[dict[str, Any]]], backwards: int) -> dict[str, float]:
    """By number of ranks; bytes of a rank are those of the one that has most."""
    results: dict[str, float] = {}
    for size, ranks in samples.items():
        number = f"on {size}"
        params = ranks[0]["num_params"]
        link = sum(rank["down_bytes"] + rank["up_bytes"] for rank in ranks)
        beside = sum(rank["told_bytes"] + rank["padding_bytes"] for rank in ranks)
        host = max(rank["state_bytes"] for rank in ranks)
        results |= {
            f"host bytes per rank over 14/N, {number}": host / (14 * params / int(size)),
            f"link bytes of all ranks over (2k+2), {number}": (link - beside) / ((2 * backwards + 2) * params),
            f"of the link: words and norms, {number}, %": 100 * sum(rank["told_bytes"] for rank in ranks) / link,
            f"of the link: padding, {number}, %": 100 * sum(rank["padding_bytes"] for rank in ranks) / link,
            f"staging slots per rank, {number}, MB": max(rank["staging_bytes"] for rank in ranks) / 1e6,
        }
        for name in ranks[0]["ms"]:
            results[f"{name}, {number}, ms"] = statistics.median(rank["ms"][name] for rank in ranks)
        if int(size) > 1:
            shares = [rank["hidden_share"] for rank in ranks]
            results[f"reduce-scatter inside backward, {number}, %"] = 100 * statistics.median(shares)
    return results
