"""Keeps what an experiment measured: one JSON file a run, with everything needed to judge and to repeat it."""

import os
import platform
import time
from pathlib import Path
from typing import Any

from zofftk.run_record import describe_run, write_record

RESULTS = Path(__file__).parent / "results"


def keep(experiment: str, config: dict[str, Any], samples: Any, results: dict[str, Any]) -> Path:
    """Writes raw `samples` and the `results` drawn from them under results/<experiment>/; returns the file."""
    machine = f"{platform.machine()}-{os.cpu_count()}cores"
    path = RESULTS / experiment / f"{time.strftime('%Y%m%d-%H%M%S')}_{machine}.json"
    write_record(path, describe_run(config, experiment=experiment, results=results, samples=samples))
    return path
