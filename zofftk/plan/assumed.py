"""Which numbers of a profile nobody has measured: its file says so beside them."""

from __future__ import annotations

import re
from pathlib import Path

_SECTION = re.compile(r"\[(\w+)\]")
_ENTRY = re.compile(r"(\w+)\s*=\s*([^#]+?)\s*#\s*(.*assumed.*)", re.IGNORECASE)


def assumed_numbers(path: Path) -> list[str]:
    """`gpu.reserved_gib = 0.75 (assumed: CUDA context, ...)`, in the order of the file."""
    section, found = "", []
    for line in path.read_text().splitlines():
        if match := _SECTION.match(line.strip()):
            section = f"{match[1]}."
        elif match := _ENTRY.match(line.strip()):
            found.append(f"{section}{match[1]} = {match[2]} ({match[3]})")
    return found
