"""The largest model of the paper's ladder of sizes that each system trains, against its Figure 7.

Predicted on the virtual clock, under one set of assumptions for all systems; nothing is fitted. Where a size differs
from the paper's, the bytes that make the difference are shown.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from experiments.paper_values import paper_values
from experiments.record import keep
from experiments.rows import row as row_of
from zofftk.baselines.ladder import ladder
from zofftk.baselines.prediction import ON_ONE_DEVICE, OWN, SYSTEMS, Prediction, predict
from zofftk.gpt_config import GPTConfig
from zofftk.profile import Profile, load_profile
from zofftk.whole_number import at_least_1

GPUS = (1, 4, 16)
# System of ours: what Figure 7 calls it.
PRINTED = {
    "ddp": "PyTorch",
    "megatron": "Megatron",
    "zero2": "ZeRO-2",
    "swapadvisor": "SwapAdvisor",
    "l2l": "L2L",
    "zero-offload-2020": "ZeRO-Offload",
}
QUICK_SYSTEMS = ("ddp", "l2l", "zero-offload-2020")
CUT = {"megatron", "zero-offload-2020", "deepspeed", OWN}  # these may cut layers
MICRO_BATCH = 1  # the largest model that trains at all trains with one sample at a time
MOST_SLICES = 8  # Table 3's, and the most that Megatron-LM was published with
ASSUMPTIONS = (
    "sequence 1024, GPT-2's vocabulary, 32 heads, 16-bit training with Adam",
    "every layer is recomputed, attention is not fused; slices keep whole activations between layers",
    "a device has the profile's memory, less what it reserves for context, workspaces and fragments",
    "devices that layers are not cut over have other data; a model fits if it fits in any cut",
    "gradients are summed in place; all devices of a node share its host memory",
)
GB = 1e9


@dataclass(frozen=True)
class Largest:
    """The largest size that fits and the one above it, in billions; what that one lacks, in bytes."""

    system: str
    gpus: int
    largest: float
    cut: int  # slices
    above: float | None
    lacks: int
    lacks_where: str
    printed: float | None

    @property
    def agrees(self) -> bool | None:
        return None if self.printed is None else self.largest == self.printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [*SYSTEMS, OWN]
    parser.add_argument("--systems", nargs="+", choices=names, default=[*PRINTED, "zero3", "deepspeed", OWN])
    parser.add_argument("--gpus", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    parser.add_argument(
        "--micro-batch", type=at_least_1, default=MICRO_BATCH, help=f"of all systems (default: {MICRO_BATCH})"
    )
    parser.add_argument(
        "--most-slices", type=int, default=MOST_SLICES, help=f"that a layer is cut over (default: {MOST_SLICES})"
    )
    parser.add_argument("--profile", default="v100-dgx2", help="the machine (default: v100-dgx2)")
    parser.add_argument("--quick", action="store_true", help="one GPU, and three systems")


def run(options: argparse.Namespace) -> int:
    profile = load_profile(options.profile)
    limits = f"micro-batch {options.micro_batch}, layers cut over at most {options.most_slices} slices"
    assumptions = (limits, *ASSUMPTIONS)
    systems, all_gpus = (QUICK_SYSTEMS, GPUS[:1]) if options.quick else (options.systems, options.gpus)
    print("assumed of all systems:", *(f"  {each}" for each in assumptions), sep="\n")
    print(f"{'system':20}{'GPUs':>5}{'largest':>9}{'slices':>8}{'paper':>7}  next one up lacks")
    rows, samples = [], []
    for system in systems:
        for gpus in all_gpus:
            row, tried = find_largest(system, gpus, profile, options.micro_batch, options.most_slices)
            rows.append(row)
            samples += [describe(each) for each in tried.values()]
            print(shown(row, tried))
    compared = [row for row in rows if row.printed is not None]
    agreeing = sum(row.agrees is True for row in compared)
    print(f"{agreeing} of {len(compared)} sizes are the paper's")
    config = {"profile": options.profile, "assumptions": assumptions}
    results: dict[str, Any] = {
        "rows": [
            row_of(PRINTED.get(each.system) or each.system, "gpus", each.gpus, each.largest, "B params", "simulated")
            for each in rows
        ],
        "sizes": [vars(row) for row in rows],
        "agreeing": agreeing,
        "compared": len(compared),
    }
    print("record:", keep("fig7", config, samples, results))
    return 0


def find_largest(
    system: str, gpus: int, profile: Profile, micro_batch: int = MICRO_BATCH, most_slices: int = MOST_SLICES
) -> tuple[Largest, dict[float, Prediction]]:
    """By halving the ladder: a larger model needs more everywhere. With every prediction made, by size."""
    models = ladder()
    sizes, tried = list(models), {}
    low, high = -1, len(sizes)  # the largest known to fit, and the smallest known not to
    while high - low > 1:
        middle = (low + high) // 2
        size = sizes[middle]
        tried[size] = best_cut(system, models[size], gpus, profile, micro_batch, most_slices)
        low, high = (middle, high) if tried[size].fits else (low, middle)
    largest = sizes[low] if low >= 0 else 0.0
    above = sizes[high] if high < len(sizes) else None
    device, host = (0, 0) if above is None else (tried[above].device_lacks, tried[above].host_lacks)
    lacks, where = max((device, "device"), (host, "host"))
    printed = paper_values("fig7").get((PRINTED.get(system, ""), str(gpus)))
    assert not isinstance(printed, str)
    return Largest(system, gpus, largest, tried[largest].slices if largest else 0, above, lacks, where, printed), tried


def best_cut(
    system: str, model: GPTConfig, gpus: int, profile: Profile, micro_batch: int, most_slices: int
) -> Prediction:
    """The cut that fits with the fewest slices of the two that need least memory, or the one that lacks least."""
    most = min(gpus, most_slices) if system in CUT else 1
    cuts = [most, most // 2] if most > 1 else [1]
    predictions = []
    for slices in cuts:
        predicted = predict(
            system, model, profile, ranks=gpus // slices, slices=slices, micro_batch=micro_batch, micro_batches=1
        )
        predictions.append(predicted)
        if not predicted.fits:
            break  # with fewer slices there is more on each device
    fitting = [each for each in predictions if each.fits]
    return fitting[-1] if fitting else predictions[0]


def shown(row: Largest, tried: dict[float, Prediction]) -> str:
    paper = "" if row.printed is None else f"{row.printed:g}"
    above = "" if row.above is None else f"{row.above:g} B: {row.lacks / GB:.1f} GB on the {row.lacks_where}"
    text = f"{row.system:20}{row.gpus:5}{row.largest:9g}{row.cut:8}{paper:>7}  {above}"
    return text if row.agrees is not False else f"{text}\n{' ' * 8}differs: {_difference(row, tried)}"


def _difference(row: Largest, tried: dict[float, Prediction]) -> str:
    """What fits here and should not have, or the other way round, in bytes of a device."""
    assert row.printed is not None
    size = row.largest if row.above is None or row.printed < row.largest else row.above
    predicted = tried[size]
    left = -predicted.device_lacks / GB
    held = {**predicted.device_bytes, "host": sum(predicted.host_bytes.values())}
    parts = ", ".join(f"{name} {nbytes / GB:.1f}" for name, nbytes in held.items() if nbytes > 0.05 * GB)
    return f"at {size:g} B {abs(left):.1f} GB are {'left' if left >= 0 else 'lacking'}: {parts}"


def describe(predicted: Prediction) -> dict[str, Any]:
    return {
        "system": predicted.system,
        "gpus": 1 if predicted.system in ON_ONE_DEVICE else predicted.ranks * predicted.slices,
        "layers": predicted.config.layers,
        "hidden": predicted.config.hidden,
        "ranks": predicted.ranks,
        "slices": predicted.slices,
        "device_bytes": predicted.device_bytes,
        "host_bytes": predicted.host_bytes,
        "fits": predicted.fits,
    }
