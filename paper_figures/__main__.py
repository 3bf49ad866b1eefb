"""python -m paper_figures [ITEM...]: draws the paper's tables and figures from records, and writes the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paper_figures.items import ITEMS
from paper_figures.records import RESULTS, MissingRecordError, Records
from paper_figures.report import write_report
from paper_figures.style import save, styled

OUT = Path(__file__).parent
DRAWN = "drawn"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m paper_figures", description=__doc__)
    names = ", ".join(ITEMS)
    parser.add_argument("items", nargs="*", metavar="ITEM", help=f"default: all of {names}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the records (default: experiments/results)")
    parser.add_argument("--out", type=Path, default=OUT, help="where drawings and report go (default: paper_figures)")
    options = parser.parse_args(arguments)
    if unknown := [item for item in options.items if item not in ITEMS]:
        parser.error(f"expected some of {names}; got {unknown[0]}")
    records = Records(options.results)
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = {item: draw(item, records, options.out) for item in options.items or ITEMS}
    for item, why in drawn.items():
        print(f"{item}: {why or 'drawn'}", file=sys.stderr if why else sys.stdout)
    # An item that is not drawn now has been drawn before, or has no record.
    whys = {item: drawn.get(item, why_not(item, records, options.out)) for item in ITEMS}
    write_report(records, whys, options.out)
    print(f"report: {options.out / 'README.md'}, {options.out / 'report.html'}")
    return 1 if options.items and any(drawn.values()) else 0


def draw(item: str, records: Records, out: Path) -> str:
    """Writes picture and data of an item; why it cannot be drawn, or nothing."""
    try:
        record = records[item]
        with styled():
            figure = ITEMS[item].draw(item, record)
            save(figure, out / DRAWN / item)
        ITEMS[item].data(item, record).to_csv(out / DRAWN / f"{item}.csv", index=False, lineterminator="\n")
    except MissingRecordError as missing:
        return str(missing)
    except (KeyError, ValueError) as error:  # a record of another form
        return f"its record cannot be read: {type(error).__name__}: {error}"
    return ""


def why_not(item: str, records: Records, out: Path) -> str:
    try:
        records[item]
    except MissingRecordError as missing:
        return str(missing)
    return "" if (out / DRAWN / f"{item}.png").exists() else f"not drawn yet: python -m paper_figures {item}"


if __name__ == "__main__":
    raise SystemExit(main())
