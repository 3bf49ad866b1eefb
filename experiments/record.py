"""Keeps what an experiment found: JSON with everything needed to judge and to repeat it.

A table or figure of the paper has one record, which a new run replaces; figures are drawn from these, and they are
committed. Other measurements keep every run.
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
_is_quick: ContextVar[bool] = ContextVar("_is_quick", default=False)


@contextmanager
def setting(*, quick: bool) -> Iterator[None]:
    """Inside, what is kept is of quick runs, or not."""
    token = _is_quick.set(quick)
    try:
        yield
    finally:
        _is_quick.reset(token)


def item_path(name: str, *, quick: bool) -> Path:
    return (RESULTS / QUICK if quick else RESULTS) / name / f"{name}.json"


def load_item(name: str) -> dict[str, Any] | None:
    """The record of a table or figure, of quick runs inside such a setting; None where there is none."""
    try:
        return json.loads(item_path(name, quick=_is_quick.get()).read_text())
    except (OSError, json.JSONDecodeError):
        return None


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
        path = item_path(experiment, quick=quick)
    else:
        machine = f"{platform.machine()}-{os.cpu_count()}cores"
        path = RESULTS / experiment / f"{time.strftime('%Y%m%d-%H%M%S')}_{machine}.json"
    write_record(path, describe_run(config, **more, results=results, samples=samples))
    return path
