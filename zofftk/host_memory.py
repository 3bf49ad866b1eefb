"""Memory this process may use: the machine's, or less where its control group says so."""

import os
from pathlib import Path


def usable_memory() -> int:
    """Bytes."""
    total = physical_memory()
    return min(total, cgroup_memory_limit() or total)


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cgroup_memory_limit(
    root: Path = Path("/sys/fs/cgroup"), own_groups: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The lowest limit of this process's control group and those above it; None where there is none."""
    limits = []
    for line in _read(own_groups).splitlines():
        _, controllers, group = line.split(":", 2)
        # Version 2 has one hierarchy without names, version 1 one for each set of controllers.
        if controllers == "":
            top, limit_file = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, limit_file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        leaf = Path(group.lstrip("/"))
        for folder in (leaf, *leaf.parents):
            value = _read(top / folder / limit_file).strip()
            if value.isdigit():
                limits.append(int(value))
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
