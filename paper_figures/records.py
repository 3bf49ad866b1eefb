"""The records that figures are drawn from: one file of JSON an item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
Record = dict[str, Any]


class MissingRecordError(Exception):
    """Says which command makes the record."""

    def __init__(self, item: str) -> None:
        super().__init__(f"no record yet: python -m experiments run {item}")
        self.item = item


def load_record(item: str, results: Path = RESULTS) -> Record:
    """Raises MissingRecordError where there is none, or none that is whole."""
    try:
        record = json.loads((results / item / f"{item}.json").read_text())
    except (OSError, ValueError):
        raise MissingRecordError(item) from None
    if not isinstance(record, dict) or not isinstance(record.get("results"), dict):
        raise MissingRecordError(item)
    return record


class Records:
    """All of one folder, read when they are asked for."""

    def __init__(self, results: Path = RESULTS) -> None:
        self.results = results
        self._read: dict[str, Record] = {}

    def __getitem__(self, item: str) -> Record:
        if item not in self._read:
            self._read[item] = load_record(item, self.results)
        return self._read[item]

    def __contains__(self, item: str) -> bool:
        try:
            self[item]
        except MissingRecordError:
            return False
        return True
