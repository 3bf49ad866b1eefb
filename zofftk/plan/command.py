"""``zofftk plan``: reads its options and hands over. What it computes with is imported when it runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zofftk.errors import InputError
from zofftk.outputs import check_file
from zofftk.plan.setting import DTYPES, POLICIES, Setting
from zofftk.presets import PRESETS

if TYPE_CHECKING:
    from zofftk.plan.answer import Plan
    from zofftk.plan.sources import Source

STANDARD_OUTPUT = Path("-")
MIB = 1 << 20


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = "Says what training a model costs, fits and takes on a machine, by dry runs of the engine."
    parser.set_defaults(run=run)
    names = ", ".join(PRESETS)
    parser.add_argument(
        "model", metavar="MODEL", help=f"{names}; a Hugging Face config.json; or module:function, which builds it"
    )
    where = parser.add_argument_group("on what")
    profile = "a profile's name or file; this: the machine that `zofftk doctor --measure` has measured"
    where.add_argument("--profile", default="v100-dgx2", metavar="NAME", help=f"{profile} (default: v100-dgx2)")
    where.add_argument("--ranks", type=int, metavar="N", help="devices in all (default: those of --tp)")
    where.add_argument("--tp", type=int, default=1, metavar="T", help="devices that share each layer (default: 1)")
    how = parser.add_argument_group("how it is trained (default: as the preset is)")
    how.add_argument("--micro-batch", type=int, metavar="N", help="sequences of one backward, on each rank")
    how.add_argument("--backwards", type=int, metavar="N", help="micro-batches a step (default: 1)")
    how.add_argument("--seq-len", type=int, metavar="N", help="tokens per sequence")
    how.add_argument("--recompute", action=argparse.BooleanOptionalAction, help="run layers again in backward")
    how.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: bf16)")
    how.add_argument("--policy", choices=POLICIES, metavar="POLICY", help=f"of the update: {'; '.join(POLICIES)}")
    how.add_argument("--bucket-mib", type=float, metavar="X", help="size of a bucket on the link")
    loss = "module:function that returns the loss, given the model and the setting"
    how.add_argument("--loss", metavar="FUNCTION", help=loss)
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--json", type=Path, metavar="FILE", help="write the answer here; - prints it, and no tables")
    shown.add_argument("--timeline", type=Path, metavar="FILE", help="write the timeline of the steps, for Perfetto")
    shown.add_argument("--quick", action="store_true", help="no search for the largest and the best")


def run(options: argparse.Namespace) -> int:
    _check_files(options)

    from rich.console import Console

    from zofftk.plan.finding import find_source
    from zofftk.plan.planner import plan

    source = find_source(options.model, options.loss)
    setting = setting_of(options, source.default)
    answer = plan(source, options.profile, setting, searches=not options.quick)
    if options.json != STANDARD_OUTPUT:
        from zofftk.plan.report import print_plan

        print_plan(answer, Console())
    if options.json is not None:
        _write_json(answer, options.json)
    if options.timeline is not None:
        _write_timeline(source, options.profile, setting, options.timeline)
    return 0


def setting_of(options: argparse.Namespace, default: Setting) -> Setting:
    """Raises InputError that names the option."""
    given: dict[str, Any] = {
        "micro_batch": options.micro_batch,
        "backwards": options.backwards,
        "seq": options.seq_len,
        "recompute": options.recompute,
        "dtype": options.dtype,
        "policy": options.policy,
    }
    if options.tp < 1:
        raise InputError(f"--tp: expected a whole number of at least 1, got {options.tp}")
    ranks = options.tp if options.ranks is None else options.ranks
    if ranks < 1 or ranks % options.tp:
        raise InputError(f"--ranks: expected a multiple of the {options.tp} of --tp, got {ranks}")
    if options.bucket_mib is not None:
        if not (isfinite(options.bucket_mib) and options.bucket_mib * MIB >= 1):
            raise InputError(f"--bucket-mib: expected a number above 0, got {options.bucket_mib}")
        given["bucket_bytes"] = round(options.bucket_mib * MIB)
    given = {name: value for name, value in given.items() if value is not None}
    for name, option in (("micro_batch", "--micro-batch"), ("backwards", "--backwards"), ("seq", "--seq-len")):
        if given.get(name, 1) < 1:
            raise InputError(f"{option}: expected a whole number of at least 1, got {given[name]}")
    return replace(default, **given, tp=options.tp, ranks=ranks // options.tp)


def _check_files(options: argparse.Namespace) -> None:
    """Raises InputError for what could not be written in the end."""
    timeline = None if options.timeline is None else check_file(options.timeline, "--timeline")
    if options.json not in (None, STANDARD_OUTPUT) and check_file(options.json, "--json") == timeline:
        raise InputError(f"--json: expected another file than --timeline, got {options.json}")


def _write_json(answer: Plan, path: Path) -> None:
    from zofftk.atomic_file import replacing

    text = json.dumps(answer.to_dict(), indent=1) + "\n"
    if path == STANDARD_OUTPUT:
        print(text, end="")
        return
    with replacing(path) as file:
        file.write(text.encode())


def _write_timeline(source: Source, profile: str, setting: Setting, path: Path) -> None:
    from zofftk.plan.trials import Trials
    from zofftk.profile import load_profile

    Trials(source, load_profile(profile)).timeline(setting).write(path)
