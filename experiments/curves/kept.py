"""Where the files of a run lie: its record, and, until it is finished, its checkpoint."""

import json
from pathlib import Path
from typing import Any

from experiments.curves.run import Run
from zofftk.errors import InputError

RESULTS = Path(__file__).parent.parent / "results"
# Checkpoints are large and of no use once a run is finished, so they lie where nothing is committed from.
CHECKPOINTS = Path(__file__).parent.parent.parent / "runs"


def record_path(run: Run) -> Path:
    return RESULTS / run.experiment / f"{run.name}.json"


def checkpoint_path(run: Run) -> Path:
    return CHECKPOINTS / run.experiment / f"{run.name}.pt"


def load_record(run: Run) -> dict[str, Any] | None:
    """The record of a finished run, or None; InputError where it is of a run that differs in more than its name."""
    path = record_path(run)
    if not path.exists():
        return None
    record = read_record(path)
    check_same(run, record["config"], path)
    return record


def read_record(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"expected a record in {path}: {error}; delete it to have the run made again") from None


def check_same(run: Run, saved: dict[str, Any], path: Path) -> None:
    for name, value in run.describe().items():
        if saved.get(name) != value:
            raise InputError(
                f"expected a run with {name} {value!r} in {path}, got {saved.get(name)!r}; --fresh makes it again"
            )


def forget(run: Run) -> None:
    for path in (record_path(run), checkpoint_path(run)):
        path.unlink(missing_ok=True)
