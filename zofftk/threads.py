"""How many threads the CPU optimizer may use, and on which cores: what this process really has, and no more.

Nothing here changes the affinity mask of a thread that is not the kernels' own, an environment variable or torch's own
thread settings.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zofftk.cores import SYS, cores_of_rank, gpu_node, host_cores, parse_list

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
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


def cgroup_quota(root: Path = CGROUPS, membership: Path = OWN_CGROUPS) -> float | None:
    """CPUs the control groups of this process grant (version 2, else version 1), None if unlimited or unknown.

    The smallest quota on the way from the process's own group up to the root counts.
    """
    quotas = (_quota_of(folder) for folder in _group_folders("cpu", root, membership))
    return min((quota for quota in quotas if quota is not None), default=None)


def cgroup_cores(root: Path = CGROUPS, membership: Path = OWN_CGROUPS) -> set[int] | None:
    """The cores the control groups of this process grant, None if unknown; the nearest group that tells counts."""
    for folder in _group_folders("cpuset", root, membership):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):  # version 2 and 1
            try:
                cores = parse_list((folder / name).read_text())
            except (OSError, ValueError):
                continue
            if cores:
                return cores
    return None


def _group_folders(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Where files of a controller may be: this process's own groups and those above them, own ones first."""
    try:
        lines = membership.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases = [root]
        elif controller in controllers.split(","):
            bases = [root / controller, root / controllers]
        else:
            continue
        group = Path(path.lstrip("/"))
        for base in bases:
            yield from (base / folder for folder in (group, *group.parents) if ".." not in folder.parts)


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


def mask_cores() -> set[int]:
    """Cores in the calling thread's affinity mask (all of the host's where there are no masks)."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def binding_variable(cores: int, mask: int, environ: Mapping[str, str]) -> str | None:
    """Name of the variable that probably bound this process to a single core, None if that is not the case."""
    if mask != 1 or cores == 1:
        return None
    return next((name for name in BINDING_VARIABLES if environ.get(name)), None)


@dataclass(frozen=True)
class RankShare:
    """What the update of this rank gets of the host; `split` if its cores are a part of what the process may use."""

    rank: int  # on this host; -1: not known, and nothing is split
    ranks: int
    threads: int
    cores: Set[int]
    split: bool
    gpu: str  # PCI id of the rank's GPU, empty if there is none or it was not asked for
    gpu_node: int | None  # the memory node next to it


def _whole_number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() and value.isascii() and len(value) <= 6 else default


def ranks_on_host() -> int:
    return max(1, _whole_number("LOCAL_WORLD_SIZE", 1))


def _pci_ids() -> list[str]:
    """Of the GPUs this process sees, by their CUDA index; empty without CuPy."""
    try:
        from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

        return [runtime.deviceGetPCIBusId(index) for index in range(runtime.getDeviceCount())]
    except Exception:
        # A broken installation raises whatever its loader raises, and a machine without a driver CuPy's own errors.
        return []


def rank_share(*, ask_cuda: bool, root: Path = SYS) -> RankShare:
    """What this process gets as one of the ranks on its host, by its environment, affinity mask and control group.

    Where all ranks see the same GPUs, rank 0 is taken to use the first, and so on; where each sees fewer, as behind a
    launcher that shows every rank its own, it knows nothing of the others', and the cores are split without regard to
    any.
    """
    ranks = ranks_on_host()
    rank = _whole_number("LOCAL_RANK", 0 if ranks == 1 else -1)
    ids = _pci_ids() if ask_cuda else []
    nodes = [gpu_node(pci_id, root) for pci_id in ids]
    mask, granted = mask_cores(), cgroup_cores()
    cores = cores_of_rank(mask, rank, ranks, nodes[:ranks], granted=granted, root=root)
    quota = cgroup_quota()  # which the ranks share
    allowed = len(cores) if quota is None else min(len(cores), int(quota / ranks))
    threads = plan_threads(len(host_cores(granted, root)), ranks, allowed, os.environ.get("OMP_NUM_THREADS"))
    own = 0 if len(ids) == 1 else rank
    gpu, node = (ids[own], nodes[own]) if 0 <= own < len(ids) else ("", None)
    return RankShare(rank, ranks, threads, cores, cores != mask, gpu, node)


def _cuda_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


@cache
def usable_threads() -> int:
    """Threads the CPU optimizer uses by default; read once per process, at the first call, in the calling thread.

    Where several ranks share the host, this call also binds the threads of the kernels' pool to this rank's cores.
    Warns once if the process is bound to one core of many while an OpenMP binding variable is set.
    """
    cores = os.cpu_count() or 1
    variable = binding_variable(cores, len(mask_cores()), os.environ)
    if variable is not None:
        warnings.warn(
            f"this process may run on 1 of {cores} cores while {variable} is set: the OpenMP runtime has probably "
            f"bound the main thread, and the CPU optimizer will use 1 thread. Unset {variable} to use more.",
            RuntimeWarning,
            stacklevel=2,
        )
    # A process without CUDA, or alone on its host, need not load CuPy.
    share = rank_share(ask_cuda=ranks_on_host() > 1 and _cuda_in_use())
    if share.split:
        from zofftk import _cpu_adam

        _cpu_adam.set_worker_cores(sorted(share.cores))
    return share.threads
