"""One report of everything: claims, errors, every picture with its caption, the calibration, hardware and versions."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from paper_figures.claims import Verdict, judge_all
from paper_figures.frames import errors_of
from paper_figures.items import ITEMS
from paper_figures.records import Record, Records

INTRODUCTION = (
    "Drawn by `python -m paper_figures` from the records of `python -m experiments all`, beside the values of the "
    "paper (Ren et al., USENIX ATC 2021). How to run and to draw: [docs/reproduce.md]({guide}).\n\n"
    "Each says how it was obtained. *Computed*: it follows from definitions. *Measured*: timed on the machine named "
    "below. *Simulated*: the engine's own schedule, or that of the compared system, on a virtual device whose clock "
    "runs by the profile of the paper's machine; no GPU was used. The error is ours over the paper's, less 1. The "
    "paper's bars are read off its pictures, within 0.3 TFLOPS."
)
TITLE = "# ZeRO-Offload's tables and figures, drawn again"
QUICK = (
    "**Drawn from quick settings**: few places of each figure and tiny runs. Verdicts and errors below are of those, "
    "and say nothing of the whole."
)
GUIDE = Path(__file__).parent.parent / "docs" / "reproduce.md"
KINDS = {
    "computed": "*Computed.*",
    "simulated": "*Simulated.*",
    "measured": "*Measured here.*",
    "simulated and measured": "*Simulated and measured here.*",
}


def markdown(records: Records, drawn: Mapping[str, str], folder: Path) -> str:
    """`drawn` says by item why it could not be drawn, or nothing; links are those of a page in `folder`."""
    is_quick = any(records[item].get("quick") for item in drawn if item in records)
    sections = [
        TITLE,
        *([QUICK] if is_quick else []),
        INTRODUCTION.format(guide=os.path.relpath(GUIDE, folder)),
        "## Claims\n\n" + claims_table(judge_all(records)),
        "## Errors\n\n" + errors_table([item for item, why in drawn.items() if not why], records),
        *scores(records),
        "## Tables and figures",
        *(_section(item, records, why) for item, why in drawn.items()),
        "## Hardware and versions\n\n" + provenance_table(records),
    ]
    return "\n\n".join(sections) + "\n"


def claims_table(verdicts: Sequence[Verdict]) -> str:
    cells = [
        [each.claim.text, f"**{each.verdict}**", each.number, each.how, _links(each.claim.items), each.claim.caution]
        for each in verdicts
    ]
    return table(["the paper claims", "verdict", "our number", "how", "from", "caution"], cells)


def _links(items: Sequence[str]) -> str:
    return ", ".join(f"[{ITEMS[item].name or item}](#{item})" for item in items)


def errors_table(items: Sequence[str], records: Records) -> str:
    cells = []
    for item in items:
        if "rows" not in records[item]["results"]:
            continue
        found = errors_of(item, records[item])
        if found["compared"] or found["ooms"]:
            cells.append(_error_cells(found))
    head = ["", "values compared", "median error", "not fitted on", "median error of these", "largest error"]
    return table([*head, "out of memory as in the paper"], cells)


def scores(records: Records) -> list[str]:
    """Of the throughput figures together, where they have been scored."""
    return ["```text\n" + "\n".join(records["scores"]["results"]["says"]) + "\n```"] if "scores" in records else []


def _error_cells(found: Mapping[str, Any]) -> list[str]:
    ooms = f"{found['ooms_agreeing']} of {found['ooms']}" if found["ooms"] else ""
    worst = f"{found['worst_error']:+.0%}, {found['worst_at']}" if found["worst_at"] else ""
    return [
        f"[{ITEMS[found['item']].name}](#{found['item']})",
        str(found["compared"]),
        percent(found["median_error"]),
        str(found["unfitted"]),
        percent(found["median_unfitted"]),
        worst,
        ooms,
    ]


def percent(share: float) -> str:
    return "" if pd.isna(share) else f"{share:.1%}"


def _section(item: str, records: Records, why: str) -> str:
    each = ITEMS[item]
    head = f'<a id="{item}"></a>\n\n### {each.heading}'
    if why:
        return f"{head}\n\nNot drawn: {why}"
    record = records[item]
    lines = [
        head,
        f"![{each.heading}](drawn/{item}.png)",
        f"{KINDS.get(record.get('kind', ''), '')} {each.note}".strip(),
        *_checks(record),
        *_words(item, record),
        f"[SVG](drawn/{item}.svg), [PDF](drawn/{item}.pdf), [CSV](drawn/{item}.csv)",
    ]
    return "\n\n".join(lines)


def _checks(record: Record) -> list[str]:
    """What was examined of a schedule."""
    checks = record["results"].get("checks")
    return ["\n".join(f"- {'yes' if holds else '**no**'}: {says}" for says, holds in checks.items())] if checks else []


def _words(item: str, record: Record) -> list[str]:
    """What an experiment says of its curves, in its own words."""
    report = record["results"].get("report")
    return ["\n".join(report).strip()] if report else []


def provenance_table(records: Records) -> str:
    cells = []
    for item in ITEMS:
        if item not in records:
            continue
        record = records[item]
        hardware, git = record.get("hardware", {}), record.get("git") or {}
        versions = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
        machine = f"{hardware.get('cpu', '')}, {hardware.get('cores', '')} cores, {_gib(hardware)} GiB"
        commit = f"{git.get('commit', '')[:10]}{' and changes' if git.get('dirty') else ''}"
        gpus = ", ".join(hardware.get("gpus", [])) or "none"
        cells.append([ITEMS[item].name or item, record.get("made", ""), machine, gpus, commit, versions])
    return table(["", "made", "machine", "GPUs", "commit", "versions"], cells)


def _gib(hardware: Mapping[str, Any]) -> str:
    return f"{hardware.get('memory_bytes', 0) / 2**30:.0f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)


STYLE = """body { font: 16px/1.5 sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #111; }
img { max-width: 100%; } table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
td, th { border: 1px solid #bbb; padding: 0.2rem 0.5rem; text-align: left; vertical-align: top; }"""


def as_html(text: str) -> str:
    """The same report as a page; pictures as SVG."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark").enable("table").render(text.replace(".png)", ".svg)"))
    title = html.escape(TITLE.removeprefix("# "))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'


def write_report(records: Records, drawn: Mapping[str, str], folder: Path) -> None:
    text = markdown(records, drawn, folder)
    (folder / "README.md").write_text(text)
    (folder / "report.html").write_text(as_html(text))
