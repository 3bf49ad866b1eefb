"""Keeps what an experiment found: JSON with everything needed to judge and to repeat it.

A table or figure of the paper has one record, which a new run replaces; figures are drawn from these, and they are
committed. Other measurements keep every run, and so does a table or figure that is run with options of its own, which
is not all of it.
"""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from experiments.registry import ITEMS
from zofftk.run_record import describe_run, write_record

RESULTS = Path(__file__).parent / "results"
QUICK = "quick"  # a folder of its own, so that trying out leaves the kept records alone
PARTIAL = "partial"  # a folder for what was run with options of its own
_is_quick: ContextVar[bool] = ContextVar("_is_quick", default=False)
_is_partial: ContextVar[bool] = ContextVar("_is_partial", default=False)


@contextmanager
def setting(*, quick: bool, partial: bool = False) -> Iterator[None]:
    """Inside, what is kept is of quick runs, or not; what is partial stands for no table or figure."""
    tokens = _is_quick.set(quick), _is_partial.set(partial)
    try:
        yield
    finally:
        _is_quick.reset(tokens[0])
        _is_partial.reset(tokens[1])


def item_path(name: str, *, quick: bool) -> Path:
    return (RESULTS / QUICK if quick else RESULTS) / name / f"{name}.json"


def load_item(name: str) -> dict[str, Any] | None:
    """The record of a table or figure, of quick runs inside such a setting; None where there is none that is whole."""
    return read_item(name, quick=_is_quick.get())


def read_item(name: str, *, quick: bool) -> dict[str, Any] | None:
    try:
        record = json.loads(item_path(name, quick=quick).read_text())
    except (OSError, ValueError):
        return None
    is_one = isinstance(record, dict) and isinstance(record.get("results"), dict)
    return record if is_one and (record.get("experiment"), record.get("quick")) == (name, quick) else None


def keep(experiment: str, config: dict[str, Any], samples: Any, results: dict[str, Any]) -> Path:
    """Writes raw `samples` and the `results` drawn from them under results/<experiment>/; returns the file.

    `results["rows"]` of a table or figure are what is drawn beside the paper's values: dicts with system, x_name, x,
    value (a number or "OOM"), unit and kind, spelled as in the paper's values where it has them.
    """
    now = time.gmtime()
    more: dict[str, Any] = {"experiment": experiment, "made": time.strftime("%Y-%m-%d %H:%M UTC", now)}
    if experiment in ITEMS:
        item, quick = ITEMS[experiment], _is_quick.get()
        more |= {"title": item.title, "kind": item.kind, "quick": quick}
    if experiment in ITEMS and not _is_partial.get():
        path = item_path(experiment, quick=_is_quick.get())
    else:
        folder = RESULTS / PARTIAL if experiment in ITEMS else RESULTS
        machine = f"{platform.machine()}-{os.cpu_count()}cores"
        path = folder / experiment / f"{time.strftime('%Y%m%d-%H%M%S')}_{machine}.json"
    write_record(path, describe_run(config, **more, results=results, samples=samples))
    return path
