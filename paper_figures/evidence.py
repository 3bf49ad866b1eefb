"""What claims are judged by: numbers of records, and the verdicts there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paper_figures.frames import OOM, Column, number, our_frame
from paper_figures.records import Records

HOLDS, IN_PART, NOT_REPRODUCED, UNTESTABLE = "holds", "holds in part", "not reproduced", "cannot be tested here"
CLOSE = 0.8  # of a gain that is claimed: so much of it, or more, and the claim holds ...
FACTOR = 2.0  # ... but not with more than so many times as much: that is another finding


@dataclass(frozen=True)
class Judgement:
    verdict: str
    number: str


class Evidence:
    """Values of records, by item. Raises MissingRecordError where there is no record."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def results(self, item: str) -> dict:
        return self.records[item]["results"]

    def values(self, item: str, system: str) -> Column:
        """By place; NaN where there is no room."""
        rows = our_frame(self.records[item])
        rows = rows[rows["system"] == system].drop_duplicates("x").set_index("x")
        return number(rows["value"])

    def oom(self, item: str, system: str) -> list[str]:
        rows = our_frame(self.records[item])
        return list(rows[(rows["system"] == system) & (rows["value"] == OOM)]["x"])

    def gains(self, item: str, system: str, other: str) -> Column:
        """Of one system over another, where both have a value, less 1."""
        return (self.values(item, system) / self.values(item, other) - 1).dropna()

    def kinds(self, items: tuple[str, ...]) -> str:
        """How it was found out, in words."""
        return ", ".join(dict.fromkeys(self.records[item].get("kind", "") for item in items))


Judge = Callable[[Evidence], Judgement]


def by_gain(gain: float, claimed: float, says: str) -> Judgement:
    """Holds where the gain is about what is claimed, in part where there is some."""
    verdict = HOLDS if CLOSE * claimed <= gain <= FACTOR * claimed else IN_PART if gain > 0 else NOT_REPRODUCED
    return Judgement(verdict, says)


def by_all(checks: list[bool], says: str) -> Judgement:
    verdict = HOLDS if all(checks) else IN_PART if any(checks) else NOT_REPRODUCED
    return Judgement(verdict, says)
