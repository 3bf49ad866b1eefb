"""Memory this process may use: the machine's, or less where its control group says so."""

import os
from collections.abc import Iterator
from pathlib import Path


def usable_memory() -> int:
    """Bytes."""
    total = physical_memory()
    return min(total, cgroup_memory_limit() or total)


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(root: Path = Path("/sys/fs/cgroup"), own_groups: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be had now without swapping: of the machine's, or less where a control group says so.

    What the system keeps of files counts as free: it is given up when somebody needs it.
    """
    free = [usable_memory()]
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for folder, limit_file, used_file in _group_folders(root, own_groups):
        limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
        if limit.isdigit() and used.isdigit():
            free.append(max(0, int(limit) - int(used) + _file_bytes(_read(folder / "memory.stat"))))
    return min(free)


def _file_bytes(stat: str) -> int:
    """Of a control group: what it is charged for files' pages that nobody has used lately."""
    entries = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
    return int(entries.get("inactive_file", entries.get("total_inactive_file", 0)))


def cgroup_memory_limit(
    root: Path = Path("/sys/fs/cgroup"), own_groups: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The lowest limit of this process's control group and those above it; None where there is none."""
    limits = []
    for folder, limit_file, _ in _group_folders(root, own_groups):
        value = _read(folder / limit_file).strip()
        if value.isdigit():
            limits.append(int(value))
    return min(limits, default=None)


def _group_folders(root: Path, own_groups: Path) -> Iterator[tuple[Path, str, str]]:
    """This process's control group and those above it, with the names of their files of limit and use."""
    for line in _read(own_groups).splitlines():
        _, controllers, group = line.split(":", 2)
        # Version 2 has one hierarchy without names, version 1 one for each set of controllers.
        if controllers == "":
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        leaf = Path(group.lstrip("/"))
        for folder in (leaf, *leaf.parents):
            yield top / folder, *names


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
