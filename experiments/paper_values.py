"""What the paper prints, by figure: read from one file, and only compared with."""

from __future__ import annotations

import csv
from pathlib import Path

VALUES = Path(__file__).parent.parent / "paper_figures" / "reference" / "paper.csv"
OOM = "OOM"


def paper_values(item: str) -> dict[tuple[str, str], float | str]:
    """Of a figure or table such as "fig7": by system and place on its axis; "OOM" where it says so."""
    with VALUES.open() as file:
        rows = [row for row in csv.DictReader(file) if row["item"] == item]
    return {(row["system"], row["x"]): row["value"] if row["value"] == OOM else float(row["value"]) for row in rows}
