"""Table 1: GPU memory of the placements that reach the least traffic, out of all placements there are."""

import argparse

from experiments.record import keep
from experiments.rows import row
from zofftk.dataflow.assumptions import PAPER
from zofftk.dataflow.optimum import Optimum
from zofftk.dataflow.record import record
from zofftk.dataflow.table import COLUMNS, Row, table_1

NAMES = {(): "none", ("g16",): "g16", ("Update",): "update", ("g16", "Update"): "g16+update"}
UNITS = {"gpu_bytes_per_param": "B/param", "reduction": "x"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""


def run(options: argparse.Namespace) -> int:
    rows = [
        row(system_of(each), "offloaded", name, float(getattr(each, name)), unit, "computed")
        for each in table_1()
        for name, unit in UNITS.items()
    ]
    for each in rows:
        print(f"{each['system']:12}{each['x']:22}{each['value']:8.4g} {each['unit']}")
    found = record(Optimum(PAPER))
    samples = {"table_1": found.pop("table_1")}
    kept = ("number_of_placements", "number_in_scope", "least_traffic", "best", "zero_offload", "layer_to_layer")
    results = {"rows": rows, "rivals": len(found["rivals_of_zero_offload"]), **{name: found[name] for name in kept}}
    print("record:", keep("table1", {"assumptions": found["assumptions"]}, samples, results))
    return 0


def system_of(placement: Row) -> str:
    on_cpu = (name for name, place in zip(COLUMNS, placement.places, strict=True) if place == "cpu")
    return NAMES[tuple(on_cpu)]
