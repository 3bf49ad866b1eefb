"""Step time with the engine against torch's fused AdamW: same bf16 model, clipping on, in turns in one process."""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from itertools import chain

import torch
from torch import nn

from experiments.record import keep
from experiments.verdict import verdict
from zofftk.data import Corpus, load_corpus
from zofftk.gpt import build_gpt
from zofftk.train import build_optimizer
from zofftk.train_config import TrainConfig

REQUIRED_RATIO = 1.10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="24m", help="model, batch and length (default: 24m)")
    parser.add_argument("--blocks", type=int, default=6, help="turns of each side (default: 6)")
    parser.add_argument("--steps", type=int, default=5, help="steps a turn, after one unmeasured (default: 5)")


def run(options: argparse.Namespace) -> int:
    config = TrainConfig.from_options({"preset": options.preset})
    corpus = load_corpus(None, vocab=config.model.vocab, seq=config.seq_len)
    torch_side, engine_side = new_model(config), new_model(config)
    optimizer = build_optimizer(engine_side, config)
    sides = {"torch": (torch_side, torch_update(torch_side, config)), "zofftk": (engine_side, optimizer.step)}
    samples: dict[str, list[list[float]]] = {name: [] for name in sides}
    with closing(optimizer):
        for _ in range(options.blocks):
            # Taking turns gives both sides the same share of whatever else this machine does.
            for name, (model, update) in sides.items():
                first = sum(len(block) + 1 for block in samples[name])
                # The first step of a turn finds the other side's data in the caches.
                times = [timed_step(model, update, corpus, config, first + i) for i in range(options.steps + 1)]
                samples[name].append(times[1:])
        report = vars(optimizer.report())
    results = compare(samples)
    show(results)
    print(
        "record:", keep("step_time", vars(config) | {"blocks": options.blocks}, samples, results | {"report": report})
    )
    return 0 if results["ratio"] <= REQUIRED_RATIO else 1


def new_model(config: TrainConfig) -> nn.Module:
    return build_gpt(config.model, seed=config.seed, dtype=torch.bfloat16)


def torch_update(model: nn.Module, config: TrainConfig) -> Callable[[], object]:
    params = list(model.parameters())
    adamw = torch.optim.AdamW(params, lr=config.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(params, config.max_grad_norm)
        adamw.step()

    return update


def timed_step(model: nn.Module, update: Callable[[], object], corpus: Corpus, config: TrainConfig, step: int) -> float:
    """Milliseconds of forward, backward, clipping, update and clearing the gradients."""
    ids, targets = corpus.batch(seed=0, step=step, batch_size=config.batch_size, seq=config.seq_len)
    began = time.perf_counter()
    loss = model(ids, targets)
    loss.backward()
    update()
    model.zero_grad()
    loss.item()
    return 1e3 * (time.perf_counter() - began)


def compare(samples: dict[str, list[list[float]]]) -> dict[str, float]:
    """Medians over all steps, and the ratio turn by turn for its spread."""
    medians = {name: statistics.median(chain.from_iterable(blocks)) for name, blocks in samples.items()}
    by_turn = [
        statistics.median(engine) / statistics.median(plain)
        for engine, plain in zip(samples["zofftk"], samples["torch"], strict=True)
    ]
    return {
        "torch_median_ms": medians["torch"],
        "zofftk_median_ms": medians["zofftk"],
        "ratio": medians["zofftk"] / medians["torch"],
        "ratio_lowest_turn": min(by_turn),
        "ratio_highest_turn": max(by_turn),
    }


def show(results: dict[str, float]) -> None:
    print(f"torch AdamW fused, clip_grad_norm_  median {results['torch_median_ms']:8.1f} ms")
    print(f"zofftk                              median {results['zofftk_median_ms']:8.1f} ms")
    print(
        f"ratio {results['ratio']:.3f}; "
        f"by turn {results['ratio_lowest_turn']:.3f} to {results['ratio_highest_turn']:.3f}"
    )
    print(f"required: a ratio of at most {REQUIRED_RATIO:.2f}: {verdict(results['ratio'] <= REQUIRED_RATIO)}")
