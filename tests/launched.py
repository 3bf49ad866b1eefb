"""`zofftk train` on several ranks of this machine, forked from this process, which has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Imported before the forks: each of them would spend seconds on it.
import zofftk.rank_checkpoint
import zofftk.split_gpt
import zofftk.train  # noqa: F401
from zofftk.cli import main

LIMIT_S = 60


@dataclass
class Started:
    """The ranks of one run, each of which writes what it says to a file."""

    processes: list[Any]
    said: list[Path]

    def wait(self, limit_s: float = LIMIT_S) -> list[int | None]:
        """The exit code of each; None for one that had to be killed after `limit_s` seconds."""
        deadline, codes = time.monotonic() + limit_s, []
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode)
        self.kill()
        return codes

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def poll(self) -> int | None:
        """An exit code, if one has ended."""
        return next((process.exitcode for process in self.processes if process.exitcode is not None), None)

    def all_say(self) -> str:
        return "\n".join(self.says(rank) for rank in range(len(self.said)))

    def says(self, rank: int) -> str:
        return self.said[rank].read_text()


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def start(
    size: int,
    folder: Path,
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    enter: Callable[[int], None] = lambda rank: None,
) -> Started:
    """`enter(rank)` runs first in each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    fork, port = multiprocessing.get_context("fork"), free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"} | dict(variables or {})
    said = [folder / f"said-{rank}-{port}" for rank in range(size)]

    def run(rank: int) -> None:
        output = os.open(said[rank], os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        torch.set_num_threads(1)
        if size > 1:
            os.environ.update(common, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        enter(rank)
        code = main(["train", *map(str, arguments)])
        sys.stdout.flush()
        os._exit(code)

    processes = [fork.Process(target=run, args=(rank,), daemon=True) for rank in range(size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads
        for process in processes:
            process.start()
    return Started(processes, said)


def await_checkpoint(folder: Path, running: Any, since_ns: int = 0, limit_s: float = LIMIT_S) -> int:
    """Until a newer one is in `folder`, or `running` has ended; its time."""
    deadline, at = time.monotonic() + limit_s, 0
    while at <= since_ns:
        assert running.poll() is None, "ended without a checkpoint"
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.005)
        with suppress(OSError):
            at = (folder / ".metadata").stat().st_mtime_ns
    return at
