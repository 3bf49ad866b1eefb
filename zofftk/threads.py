"""How many threads the CPU optimizer may use: as many as this process really has, and no more.

Nothing here changes an affinity mask, an environment variable or torch's own thread settings.
"""

import os
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# Variables by which an OpenMP runtime binds the main thread to one core at load.
BINDING_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND")


def plan_threads(cores: int, local_world_size: int, allowed: int, omp_num_threads: str | None = None) -> int:
    """The number of threads one rank should use, at least 1.

    Args:
        cores: cores of this host.
        local_world_size: ranks on this host, which share the cores evenly.
        allowed: cores this process may run on (affinity mask and CPU quota); never exceeded.
        omp_num_threads: value of OMP_NUM_THREADS, None if unset. "1" is what torchrun sets without being asked and
            does not count; a larger number is somebody's wish and caps the result.
    """
    planned = min(allowed, cores // max(1, local_world_size))
    # OMP_NUM_THREADS may be a list, one number per nesting level.
    wish = (omp_num_threads or "").split(",")[0].strip()
    if wish.isdecimal() and int(wish) > 1:
        planned = min(planned, int(wish))
    return max(1, planned)


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPUs the control groups of this process grant (version 2, else version 1), None if unlimited or unknown.

    The smallest quota on the way from the process's own group up to the root counts.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [root]
        elif "cpu" in controllers.split(","):
            bases = [root / "cpu", root / controllers]
        else:
            continue
        group = Path(path.lstrip("/"))
        quotas += [
            quota
            for base in bases
            for folder in (group, *group.parents)
            if ".." not in folder.parts and (quota := _quota_of(base / folder)) is not None
        ]
    return min(quotas, default=None)


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def mask_cores() -> int:
    """Cores in the calling thread's affinity mask (all of the host's where there are no masks)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed_cores() -> int:
    """Cores the calling thread may use now: its affinity mask, capped by the control group's quota."""
    quota = cgroup_quota()
    return mask_cores() if quota is None else max(1, min(mask_cores(), int(quota)))


def binding_variable(cores: int, mask: int, environ: Mapping[str, str]) -> str | None:
    """Name of the variable that probably bound this process to a single core, None if that is not the case."""
    if mask != 1 or cores == 1:
        return None
    return next((name for name in BINDING_VARIABLES if environ.get(name)), None)


def _local_world_size() -> int:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdecimal() and int(value) > 0 else 1


@cache
def usable_threads() -> int:
    """Threads the CPU optimizer uses by default; read once per process, at the first call, in the calling thread.

    Warns once if the process is bound to one core of many while an OpenMP binding variable is set.
    """
    cores = os.cpu_count() or 1
    variable = binding_variable(cores, mask_cores(), os.environ)
    if variable is not None:
        warnings.warn(
            f"this process may run on 1 of {cores} cores while {variable} is set: the OpenMP runtime has probably "
            f"bound the main thread, and the CPU optimizer will use 1 thread. Unset {variable} to use more.",
            RuntimeWarning,
            stacklevel=2,
        )
    return plan_threads(cores, _local_world_size(), allowed_cores(), os.environ.get("OMP_NUM_THREADS"))
