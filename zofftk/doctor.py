"""What this machine offers to the engine, and what to do about each thing it lacks."""

import importlib
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zofftk.host_memory import physical_memory, usable_memory

GIB = 1 << 30
HOST_BYTES_PER_PARAM = 16
# The engine page-locks its host buffers; less than this and even a small model's do not fit.
SMALL_LOCK_LIMIT = GIB


@dataclass(frozen=True)
class Check:
    """One row: `advice` is empty where nothing is missing; without a `required` thing the engine cannot work."""

    name: str
    found: str
    advice: str = ""
    required: bool = False


def run_doctor(console: Console | None = None) -> int:
    """Prints all checks; returns 0 unless something required is missing."""
    console = Console() if console is None else console
    checks = [check() for check in CHECKS]
    table = Table("", "check", "found", title="zofftk doctor", title_justify="left")
    for check in checks:
        mark = "[green]ok[/]" if not check.advice else "[red]no[/]" if check.required else "[yellow]--[/]"
        table.add_row(mark, check.name, check.found)
    console.print(table)
    for check in checks:
        if check.advice:
            console.print(f"{check.name}: {check.advice}", soft_wrap=True, highlight=False, markup=False)
    return int(any(check.advice and check.required for check in checks))


def check_torch() -> Check:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return Check("PyTorch", str(error), "install it: pip install torch", required=True)
    return Check("PyTorch", torch.__version__)


def check_cpu_adam() -> Check:
    try:
        cpu_adam = importlib.import_module("zofftk._cpu_adam")
        return Check("CPU Adam", f"{cpu_adam.isa()} (this CPU can: {', '.join(cpu_adam.available_isas())})")
    except (ValueError, RuntimeError) as error:
        advice = "set ZOFFTK_ISA to one that this CPU has, or unset it"
        return Check("CPU Adam", f"not usable: {error}", advice, required=True)
    except (ImportError, AttributeError) as error:
        advice = "build the extension with a C++17 compiler: in the checkout, pip install --force-reinstall --no-deps ."
        return Check("CPU Adam", f"not usable: {error}", advice, required=True)


def check_cores() -> Check:
    here = os.cpu_count() or 1
    if "LOCAL_WORLD_SIZE" in os.environ:
        return Check("cores", _cores_of_this_rank(here))
    try:
        usable = importlib.import_module("zofftk.threads").usable_threads()
    except (ImportError, AttributeError):
        usable = len(os.sched_getaffinity(0))
    found = f"{usable} of {here}"
    if usable < here:
        return Check("cores", found, "this process may not use every core; widen its affinity mask or cgroup CPU quota")
    return Check("cores", found)


def _cores_of_this_rank(here: int) -> str:
    threads, cores = importlib.import_module("zofftk.threads"), importlib.import_module("zofftk.cores")
    share = threads.rank_share(ask_cuda=True)
    nodes = {node for node, of_node in cores.node_cores().items() if of_node & share.cores}
    rank = share.rank if share.rank >= 0 else "unknown (set LOCAL_RANK)"
    text = f"{share.threads} of {here} for local rank {rank} of {share.ranks}: on {cores.format_list(share.cores)}"
    text += f", node {cores.format_list(nodes)}" if nodes else ""
    text += "" if share.split else ", not split"
    if share.gpu:
        text += f"; GPU {share.gpu} at node {'unknown' if share.gpu_node is None else share.gpu_node}"
    return text


def check_memory() -> Check:
    total, usable = physical_memory(), usable_memory()
    found = f"{usable / GIB:.1f} GiB, room for states of about {usable / HOST_BYTES_PER_PARAM / 1e9:.1f}B parameters"
    if usable < total:
        advice = f"a cgroup limit leaves {usable / GIB:.1f} of {total / GIB:.1f} GiB; raise it"
        return Check("host memory", found, advice)
    return Check("host memory", found)


def check_huge_pages() -> Check:
    setting = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    if not setting:
        return Check("transparent huge pages", "not known")
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen == "never":
        advice = "large host buffers run faster with them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Check("transparent huge pages", chosen, advice)
    return Check("transparent huge pages", chosen)


def check_gpu() -> Check:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return Check("GPU", "not known without PyTorch", "install PyTorch first")
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            advice = "models train on the CPU; for a GPU install a CUDA build of torch"
            return Check("GPU", "none: this PyTorch has no CUDA", advice)
        return Check("GPU", "none found", "models train on the CPU; for a GPU install its NVIDIA driver")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Check("GPU", ", ".join(f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in gpus))


def check_cupy() -> Check:
    advice = "needed on a GPU only: pip install cupy-cuda12x or cupy-cuda13x, as torch.version.cuda says"
    return _check_package("CuPy", "cupy", advice)


def check_triton() -> Check:
    return _check_package("Triton", "triton", "needed on a GPU only; CUDA builds of torch bring it: pip install triton")


def _check_package(name: str, module: str, advice: str) -> Check:
    if find_spec(module) is None:
        return Check(name, "not installed", advice)
    try:
        return Check(name, importlib.import_module(module).__version__)
    except Exception as error:
        # A broken installation raises whatever its loader raises.
        return Check(name, f"installed, but fails: {type(error).__name__}: {error}", advice)


def check_page_locked() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check("page-locked memory", "no limit")
    found = f"at most {limit / GIB:.2f} GiB"
    if limit < SMALL_LOCK_LIMIT:
        return Check("page-locked memory", found, "GPU copies may be slower; raise it: ulimit -l unlimited")
    return Check("page-locked memory", found)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


CHECKS: tuple[Callable[[], Check], ...] = (
    check_torch,
    check_cpu_adam,
    check_cores,
    check_memory,
    check_huge_pages,
    check_gpu,
    check_cupy,
    check_triton,
    check_page_locked,
)
