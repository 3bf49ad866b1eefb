"""python -m paper_figures [ITEM...]: draws the paper's tables and figures from records, and writes the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from paper_figures.items import ITEMS
    from paper_figures.records import RESULTS, MissingRecordError, Records
    from paper_figures.report import write_report
    from paper_figures.style import save, styled
except ModuleNotFoundError as error:
    raise SystemExit(f"error: no module {error.name}: drawing needs pip install -e '.[figures]'") from None

OUT = Path(__file__).parent
DRAWN = "drawn"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m paper_figures", description=__doc__)
    names = ", ".join(ITEMS)
    parser.add_argument("items", nargs="*", metavar="ITEM", help=f"these alone, without the report, of {names}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the records (default: experiments/results)")
    parser.add_argument("--out", type=Path, default=OUT, help="where drawings and report go (default: paper_figures)")
    options = parser.parse_args(arguments)
    if unknown := [item for item in options.items if item not in ITEMS]:
        parser.error(f"expected some of {names}; got {unknown[0]}")
    if not options.results.is_dir():
        parser.error(f"--results: expected a folder of records, got {options.results}")
    try:
        return carry_out(options.items, Records(options.results), options.out)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def carry_out(items: Sequence[str], records: Records, out: Path) -> int:
    """The report is of all items as they are drawn now, so it is written with all of them. An item without a record
    fails where it is asked for; the report says which command makes it.
    """
    drawn = {item: draw(item, records, out) for item in items or ITEMS}
    for item, why in drawn.items():
        print(f"{item}: {why or 'drawn'}", file=sys.stderr if why else sys.stdout)
    if not items:
        write_report(records, drawn, out)
        print(f"report: {out / 'README.md'}, {out / 'report.html'}")
    return 1 if any(why and (items or item in records) for item, why in drawn.items()) else 0


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
    except (KeyError, TypeError, ValueError) as error:  # a record of another form
        says = f"its record cannot be read: {type(error).__name__}: {error}"
        return f"{says}; python -m experiments run {item} --again makes it anew"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
