"""``zofftk dataflow``: reads its options and hands over. What it computes with is imported when it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from zofftk.dataflow.assumptions import GRADIENTS, MASTERS, OPTIMIZERS, STATES, Assumptions
from zofftk.errors import InputError
from zofftk.outputs import check_file

if TYPE_CHECKING:
    from zofftk.dataflow.optimum import Optimum
    from zofftk.dataflow.placements import Placement

STANDARD_OUTPUT = Path("-")


def add_dataflow(parser: argparse.ArgumentParser) -> None:
    parser.description = "Tries every placement of the data-flow graph of mixed-precision training on GPU and CPU."
    parser.set_defaults(run=run)
    assumed = parser.add_argument_group("what is assumed (default: as in the ZeRO-Offload paper)")
    assumed.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="(default: adam)")
    assumed.add_argument("--gradients", choices=GRADIENTS, default="fp16", help="(default: fp16)")
    assumed.add_argument("--states", choices=STATES, default="fp32", help="of the optimizer (default: fp32)")
    assumed.add_argument("--master", choices=MASTERS, default="fp32", help="parameters of the update (default: fp32)")
    split = "place the nodes of this fraction of the parameters apart from the rest's"
    assumed.add_argument("--split", type=_fraction, metavar="X", help=split)
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--on-cpu", nargs="+", metavar="NODE", help="also this placement: these nodes, no others")
    drawn = "draw the graph and the cut of that placement, or of the best, into an SVG or PNG file"
    shown.add_argument("--draw", type=Path, metavar="FILE", help=drawn)
    shown.add_argument("--json", type=Path, metavar="FILE", help="write the results here; - prints them, and no tables")
    shown.add_argument("--all-placements", action="store_true", help="every placement as well, with --json")


def _fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"expected a number such as 0.25 or 1/4, got {text}") from None


def run(options: argparse.Namespace) -> int:
    assumptions = Assumptions(
        gradients=options.gradients,
        optimizer=options.optimizer,
        states=options.states,
        master=options.master,
        split=options.split,
    )
    _check_files(options)

    from rich.console import Console

    from zofftk.dataflow.optimum import Optimum
    from zofftk.dataflow.report import print_report

    optimum = Optimum(assumptions)
    chosen = None
    if options.on_cpu is not None:
        try:
            chosen = optimum.placements.find(options.on_cpu)
        except InputError as error:
            raise InputError(f"--on-cpu: {error}") from None
    if options.json != STANDARD_OUTPUT:
        print_report(optimum, Console(), chosen)
    if options.json is not None:
        _write_json(optimum, chosen, options)
    if options.draw is not None:
        _draw(optimum, options.draw, (optimum.best[0] if chosen is None else chosen).on_cpu)
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """Raises InputError for what could not be written in the end."""
    drawing = None
    if options.draw is not None:
        from zofftk.dataflow.drawing import check_format

        try:
            check_format(options.draw)
        except InputError as error:
            raise InputError(f"--draw: {error}") from None
        drawing = check_file(options.draw, "--draw")
    if options.json is None:
        if options.all_placements:
            raise InputError("--all-placements: expected --json FILE with it, got none")
    elif options.json != STANDARD_OUTPUT and check_file(options.json, "--json") == drawing:
        raise InputError(f"--json: expected another file than --draw, got {options.json}")


def _write_json(optimum: Optimum, chosen: Placement | None, options: argparse.Namespace) -> None:
    from zofftk.atomic_file import replacing
    from zofftk.dataflow.record import record

    results = record(optimum, chosen, all_placements=options.all_placements)
    text = json.dumps(results, indent=1) + "\n"
    if options.json == STANDARD_OUTPUT:
        print(text, end="")
        return
    with replacing(options.json) as file:
        file.write(text.encode())


def _draw(optimum: Optimum, path: Path, on_cpu: Sequence[str]) -> None:
    from zofftk.dataflow.drawing import panels_of, write_drawing

    write_drawing(path, panels_of(optimum, on_cpu))
