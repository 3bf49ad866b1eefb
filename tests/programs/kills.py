"""Kills runs at random moments, has them go on, and prints what became of each kill, a line of JSON each.

    python -m tests.programs.kills COUNT SEED [with faults]

Every run is a fork of this process, which has the imports and no threads of zofftk's. The moment is uniform over the
time that the whole run takes. `with faults` goes on with saving that is made wrong, each until a kill has shown it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# It starts threads of its own.
sys.modules["triton"] = None  # type: ignore[assignment]

import torch  # noqa: E402

import zofftk  # noqa: E402
from tests.programs.killed_runs import RUNS  # noqa: E402

HANGS_AFTER_S = 60.0
TRIES = 40
Run = Callable[[Path], str]


@contextmanager
def in_place(path: Path) -> Iterator[Any]:
    """What `replacing` must not be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        yield file


FAULTS = {
    "files are written in place": mock.patch("zofftk.saving.replacing", in_place),
    "what is late is not saved": mock.patch("zofftk.lateness.state", return_value=None),
}


class Fork:
    """A child that runs `run` in `folder`; its result and its errors are in files beside."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._folder = folder
        self.start_s = time.monotonic()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(os.open(f"{folder}.errors", os.O_WRONLY | os.O_CREAT), 2)
                Path(f"{folder}.result").write_text(run(folder))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        self.pid = pid

    def is_over(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def result(self) -> str:
        """What it returned; RuntimeError with its traceback where it ended otherwise."""
        while not self.is_over():
            if time.monotonic() > self.start_s + HANGS_AFTER_S:
                self.kill()
                raise RuntimeError("it hangs")
            time.sleep(0.002)
        self.seconds = time.monotonic() - self.start_s
        if os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) != 0:
            raise RuntimeError(Path(f"{self._folder}.errors").read_text())
        return Path(f"{self._folder}.result").read_text()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def go_on(run: Run) -> Run:
    """Everything that is called a checkpoint is whole; from the newest one, the run goes to its end."""

    def checked(folder: Path) -> str:
        for path in folder.glob("*.pt"):
            zofftk.load(path)
        return run(folder)

    return checked


class Killer:
    """`ends` are how the runs end where nobody kills them, and how long that takes."""

    def __init__(self, where: Path, seed: int) -> None:
        self.where, self.random, self.count = where, random.Random(seed), 0
        self.ends: dict[str, tuple[str, float]] = {}
        for name, run in RUNS.items():
            whole = Fork(run, self.new_folder())
            self.ends[name] = whole.result(), whole.seconds

    def new_folder(self) -> Path:
        self.count += 1
        folder = self.where / f"run {self.count}"
        folder.mkdir()
        return folder

    def kill(self, name: str) -> dict[str, Any]:
        """One run that is killed, and goes on; now and then it is killed once more."""
        folder, error = self.new_folder(), None
        after_s = [self._kill_once(name, folder)]
        in_save = any(path.name.startswith(".") for path in folder.iterdir())
        try:
            if self.random.random() < 0.3:
                after_s.append(self._kill_once(name, folder))
            if Fork(go_on(RUNS[name]), folder).result() != self.ends[name][0]:
                error = "the run ends otherwise than without the kill"
        except RuntimeError as raised:
            error = str(raised)
        shutil.rmtree(folder)
        return {"run": name, "after_s": after_s, "in_save": in_save, "error": error}

    def _kill_once(self, name: str, folder: Path) -> float:
        """The run goes on in `folder` until it is killed; how long after its start."""
        before, within_s = self.new_folder(), self.ends[name][1]
        for _ in range(TRIES):
            shutil.copytree(folder, before, dirs_exist_ok=True)
            after_s = self.random.uniform(0.0, within_s)
            victim = Fork(go_on(RUNS[name]), folder)
            time.sleep(after_s)
            if not victim.is_over():
                victim.kill()
                shutil.rmtree(before)
                return after_s
            victim.result()
            within_s = min(within_s, victim.seconds)  # it was over before: little was left of it
            shutil.rmtree(folder)
            before.rename(folder)
        raise RuntimeError(f"{name} was over {TRIES} times before it could be killed")


def main(count: int, seed: int, with_faults: bool) -> None:
    with tempfile.TemporaryDirectory() as where:
        killer = Killer(Path(where), seed)
        for number in range(count):
            print(json.dumps(killer.kill([*RUNS][number % len(RUNS)])), flush=True)
        for fault, patch in FAULTS.items() if with_faults else ():
            with patch:
                outcomes = (killer.kill("delayed AdamW in one file") for _ in range(TRIES))
                found = next((outcome for outcome in outcomes if outcome["error"]), {"error": None})
            print(json.dumps({**found, "fault": fault}), flush=True)


def warm_up() -> None:
    """Has everything imported, and leaves no thread."""
    torch.set_num_threads(1)
    sys.stdout, stdout = open(os.devnull, "w"), sys.stdout  # noqa: SIM115
    for run in RUNS.values():
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder))
    sys.stdout = stdout
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1


if __name__ == "__main__":
    warm_up()
    main(int(sys.argv[1]), int(sys.argv[2]), "with faults" in sys.argv[3:])
