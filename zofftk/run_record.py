"""The record of a run: what was asked, on what it ran, and every raw sample."""

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zofftk.atomic_file import replacing

SCHEMA = "zofftk run 1"
PACKAGES = ("zofftk", "torch", "numpy", "sentencepiece", "cupy-cuda12x", "cupy-cuda13x", "triton")


def describe_run(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Everything about a run that is known before its first step."""
    return {
        "schema": SCHEMA,
        "command": _command(),
        "config": config,
        "git": git_state(Path(__file__).parent),
        "versions": {"python": platform.python_version()} | _package_versions(),
        "hardware": hardware(),
    } | more


def _command() -> str:
    """As it was typed, without the folders the program lies in."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return " ".join([name, shlex.join(sys.argv[1:])]).strip()


def write_record(path: Path, record: dict[str, Any]) -> None:
    # Non-finite losses are written as NaN and Infinity, which Python and pandas read back.
    text = json.dumps(record, indent=1, default=str)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and dirty flag where the code runs from a checkout of its own, None where it is installed."""
    root = folder.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _package_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
