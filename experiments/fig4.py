"""Figure 4: what each of several ranks holds on its GPU and on the host, by the partition that the engine makes."""

import argparse
from typing import Any

import torch

from experiments.record import keep
from experiments.rows import row
from zofftk.layout import Layout
from zofftk.offload_adam import OffloadAdamW
from zofftk.plan.sources import Source, preset_source
from zofftk.profile import load_profile
from zofftk.virtual.dry_run import training
from zofftk.virtual.durations import Durations
from zofftk.virtual.rehearsal import Rehearsal

MODEL, RANKS = "1b", 4
BUCKET_BYTES = 256 << 20  # few enough to be told apart in a picture
STATES = ("master", "exp_avg", "exp_avg_sq")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL, help=f"a preset (default: {MODEL})")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"default: {RANKS}")


def run(options: argparse.Namespace) -> int:
    layout, num_params = partition(preset_source(options.model), options.ranks)
    shards = [_shard(number, rank, shard) for number, rank, shard in _shards(layout)]
    held = [sum(each["numel"] for each in shards if each["rank"] == rank) for rank in range(options.ranks)]
    rows = [row("every rank", "on the GPU", "parameters", 2 * num_params / 1e9, "GB", "computed")]
    for rank, numel in enumerate(held):
        for name, nbytes in (("gradients", 2), *((state, 4) for state in STATES)):
            rows.append(row(f"rank {rank}", "on the host", name, nbytes * numel / 1e9, "GB", "computed"))
    print(f"{options.model}: {num_params:,} parameters in {len(layout.buckets)} buckets over {options.ranks} ranks")
    for rank, numel in enumerate(held):
        print(f"rank {rank}: {numel:,} elements, {options.ranks * numel / num_params:.4f} of its share")
    config = {"model": options.model, "ranks": options.ranks, "bucket_bytes": BUCKET_BYTES}
    results = {"rows": rows, "num_params": num_params, "held": held, "shards": shards}
    print("record:", keep("fig4", config, None, results))
    return 0


def partition(source: Source, ranks: int) -> tuple[Layout, int]:
    """As the engine lays the parameters out, and how many they are."""
    setting = source.default
    rehearsal = Rehearsal(
        lambda: source.build(None, setting, None),
        lambda model: source.loss(model, setting),
        Durations(load_profile("v100-dgx2"), ranks),
        dtype=torch.bfloat16,
    )
    with training(rehearsal, OffloadAdamW, overlap=False, bucket_bytes=BUCKET_BYTES) as optimizer:
        (segment,) = optimizer._require_engine().segments
        return segment.layout, sum(param.numel() for param in rehearsal.program.params.values())


def _shards(layout: Layout):
    for number, bucket in enumerate(layout.buckets):
        for rank, shard in enumerate(bucket.shards):
            yield number, rank, shard


def _shard(bucket: int, rank: int, shard: Any) -> dict[str, Any]:
    numel = sum(piece.numel for piece in shard.pieces)
    params = sorted({piece.param for piece in shard.pieces})
    return {"bucket": bucket, "rank": rank, "numel": numel, "first_param": params[0], "last_param": params[-1]}
