"""python -m experiments list | run NAME... | all | NAME [options]"""

import argparse
import importlib
import sys

from rich.console import Console

from experiments.carry_out import carry_out
from experiments.record import setting
from experiments.registry import ITEMS, described
from zofftk.cli import explain

LIST, RUN, ALL = "list", "run", "all"
WHOLE = {"quick", "fresh", "kept"}  # options with which an experiment is still all of it


def main() -> int:
    if not sys.argv[1:]:
        print(listing())
        return 0
    options = build_parser(sys.argv[1]).parse_args()
    try:
        return options.carry_out(options)
    except BaseException as error:
        code = explain(error, "experiments")
        if code is None:
            raise
        return code


def build_parser(chosen: str) -> argparse.ArgumentParser:
    """Only the experiment that is `chosen` brings its options, and with them everything it imports."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Experiments, each kept as a record.")
    commands = parser.add_subparsers(title="commands and experiments", metavar="NAME", required=True)
    listed = commands.add_parser(LIST, help="say what there is, how each is obtained, and its minutes")
    listed.set_defaults(carry_out=lambda options: print(listing()) or 0)
    for command, does in ((RUN, "run tables and figures by name"), (ALL, "run every table and figure of the paper")):
        several = commands.add_parser(command, help=f"{does}, but those that have a record")
        if command == RUN:
            several.add_argument("names", nargs="+", choices=ITEMS, metavar="NAME", help=", ".join(ITEMS))
        several.add_argument("--quick", action="store_true", help="small settings, kept apart from the full ones")
        several.add_argument("--fresh", action="store_true", help="also what has a record, and the long training runs")
        several.add_argument("--again", action="store_true", help="also what has a record, but no training run")
        several.set_defaults(carry_out=run_several, names=list(ITEMS))
    for name, shows in described().items():
        command = commands.add_parser(name, help=shows)
        if name == chosen:
            module = importlib.import_module(f"experiments.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            usual = vars(command.parse_args([]))
            if name in ITEMS and "quick" not in usual:
                command.add_argument("--quick", action="store_true", help="as without, kept with quick runs")
            command.set_defaults(carry_out=run_one, run=module.run, usual=usual)
    return parser


def run_several(options: argparse.Namespace) -> int:
    names = list(dict.fromkeys(options.names))
    return carry_out(names, quick=options.quick, fresh=options.fresh, again=options.again, console=Console())


def run_one(options: argparse.Namespace) -> int:
    """With options that choose a part, or another setting, the record is kept apart."""
    is_partial = any(getattr(options, name) != value for name, value in options.usual.items() if name not in WHOLE)
    with setting(quick=getattr(options, "quick", False), partial=is_partial):
        return options.run(options)


def _minutes(minutes: float) -> str:
    return "" if minutes < 1 else " about a minute" if minutes == 1 else f" about {minutes:g} minutes"


def listing() -> str:
    shown = described()
    measurements = [name for name in shown if name not in ITEMS]
    minutes = {name: _minutes(item.minutes) for name, item in ITEMS.items()}
    return "\n".join(
        [
            "Tables and figures of the paper, each with one record under experiments/results:",
            *(f"  {name:20}{shown[name]}{minutes[name] and ',' + minutes[name]}" for name in ITEMS),
            "Measurements; each run keeps a record of its own there:",
            *(f"  {name:20}{shown[name]}" for name in measurements),
            "Run every table and figure with `python -m experiments all`, some with `python -m experiments run NAME`.",
            "Run one with `python -m experiments NAME`; its options: `python -m experiments NAME --help`.",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
