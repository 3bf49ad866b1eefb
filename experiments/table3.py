"""Table 3: the models, their parameters, and whether they fit as the paper says they were trained.

The table cuts 40 and 60 billion parameters over 2 GPUs, where the 16-bit parameters alone take more than a GPU has.
Beside the printed degree stands the smallest with which the printed batch fits.
"""

import argparse
from dataclasses import replace
from typing import Any

from experiments.paper_values import paper_values
from experiments.record import keep
from experiments.rows import row
from zofftk.baselines.prediction import OWN, predict
from zofftk.gpt_config import GPTConfig
from zofftk.presets import PRESETS, TABLE_3
from zofftk.profile import load_profile

PROFILE = "v100-dgx2"
QUICK = ("1b", "40b")
DEGREES = (1, 2, 4, 8, 16)
GPUS = 16  # those of a node, where layers are cut; else one
RELEASED = "zero-offload-2020"
GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} alone")


def run(options: argparse.Namespace) -> int:
    printed, profile = paper_values("table3"), load_profile(PROFILE)
    rows, samples = [], []
    print(f"{'model':8}{'parameters':>15}{'printed MP':>12}{'fits':>6}{'smallest MP':>13}{'ours fits':>11}")
    for name in QUICK if options.quick else TABLE_3:
        size, model = name.upper(), PRESETS[name].model
        batch, degree = (int(printed[size, field]) for field in ("batch_per_gpu", "mp_degree"))
        tried = try_degrees(model, degree, batch, profile)
        ours = needs(OWN, model, degree, batch, profile)
        samples += [{"model": size} | each for each in (*tried, ours)]
        rows += rows_of(size, model, batch, degree, tried, ours)
        (at_printed,) = (each for each in tried if each["mp_degree"] == degree)
        print(
            f"{size:8}{model.num_params:15,}{degree:12}{'yes' if at_printed['fits'] else 'NO':>6}"
            f"{smallest_degree(tried) or 'none':>13}{'yes' if ours['fits'] else 'NO':>11}"
        )
    config = {"profile": PROFILE, "gpus where layers are cut": GPUS}
    print("record:", keep("table3", config, samples, {"rows": rows}))
    return 0


def needs(system: str, model: GPTConfig, degree: int, batch: int, profile: Any) -> dict[str, Any]:
    ranks = 1 if degree == 1 else GPUS // degree
    predicted = predict(
        system, replace(model, recompute=False), profile, ranks=ranks, slices=degree, micro_batch=batch, micro_batches=2
    )
    return {
        "system": system,
        "mp_degree": degree,
        "batch_per_gpu": batch,
        "device_bytes": sum(predicted.device_bytes.values()),
        "device_lacks_bytes": max(0, predicted.device_lacks),
        "host_lacks_bytes": max(0, predicted.host_lacks),
        "fits": predicted.fits,
    }


def try_degrees(model: GPTConfig, printed: int, batch: int, profile: Any) -> list[dict[str, Any]]:
    """In rising order up to one that fits; the printed one in any case."""
    tried = [needs(RELEASED, model, printed, batch, profile)]
    for degree in DEGREES:
        if degree != printed:
            tried.append(needs(RELEASED, model, degree, batch, profile))
        if smallest_degree(tried) in (degree, 1):
            break
    return tried


def smallest_degree(tried: list[dict[str, Any]]) -> int | None:
    return min((each["mp_degree"] for each in tried if each["fits"]), default=None)


def rows_of(
    size: str, model: GPTConfig, batch: int, degree: int, tried: list[dict[str, Any]], ours: dict[str, Any]
) -> list[dict[str, Any]]:
    (at_printed,) = (each for each in tried if each["mp_degree"] == degree)
    computed = {
        ("layers", ""): model.layers,
        ("hidden", ""): model.hidden,
        ("parameters", "B params"): model.num_params / 1e9,
        ("parameters without embeddings", "B params"): 12 * model.layers * model.hidden**2 / 1e9,
        ("16-bit parameters", "GB"): 2 * model.num_params / GB,
    }
    simulated = {
        ("batch_per_gpu", ""): batch,
        ("mp_degree", ""): smallest_degree(tried) or "OOM",
        ("fits as printed", ""): "yes" if at_printed["fits"] else "OOM",
        ("on a GPU, as printed", "GB"): at_printed["device_bytes"] / GB,
        ("fits as printed, zofftk", ""): "yes" if ours["fits"] else "OOM",
    }
    return [row(size, "field", name, value, unit, "computed") for (name, unit), value in computed.items()] + [
        row(size, "field", name, value, unit, "simulated") for (name, unit), value in simulated.items()
    ]
