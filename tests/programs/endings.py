"""Runs the cases that are named, each as the main program of a process of its own, and prints how that process ended.

The processes are forks of this one, which has the imports and no threads. A line each: the name, the exit code (or
"hangs"), the seconds it took, and what it wrote to its standard error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

# It reports leaks at the end of a process that has frozen its objects.
sys.modules["triton"] = None  # type: ignore[assignment]

import torch  # noqa: E402

import zofftk  # noqa: E402
from zofftk.device.emulated import EmulatedDevice  # noqa: E402

HANGS_AFTER_S = 20.0


class Slow(EmulatedDevice):
    """The updates of a bucket take longer by `delay_s`."""

    delay_s = 0.0

    def _host_task(self, label, task):
        super()._host_task(label, lambda: (label.startswith("adam") and time.sleep(self.delay_s), task()))


class Faulty(EmulatedDevice):
    def _host_task(self, label, task):
        super()._host_task(label, _fail if label.startswith("adam") else task)


def _fail():
    time.sleep(0.1)  # step() has returned by then, if it returns early
    raise MemoryError("no room")


def build(device=None, **options):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    return model, zofftk.OffloadAdamW(model.parameters(), lr=0.1, device=device or Slow(), **options)


def step(model, opt):
    model(torch.ones(2, 64)).sum().backward()
    opt.step()
    opt.zero_grad()


def under_way(delay_s=0.3):
    """A model whose update has begun and takes a while."""
    device = Slow()
    model, opt = build(device)
    zofftk.offload(model, opt)
    step(model, opt)
    device.delay_s = delay_s
    step(model, opt)
    return model, opt


def normal():
    model, opt = build()
    for _ in range(3):
        step(model, opt)


def exception():
    model, _opt = build()
    model(torch.ones(2, 64)).sum().backward()
    raise ValueError("of the training loop")


def exit_3():
    _kept = under_way(2.0)
    sys.exit(3)


def kept_by_a_module():
    globals()["_kept"] = under_way()


def exception_under_way():
    _kept = under_way()
    raise ValueError("of the training loop")


def closed_under_way():
    _model, opt = under_way()
    opt.close()
    opt.close()


def fault_seen():
    model, opt = build(Faulty())
    try:
        step(model, opt)
    except MemoryError:
        sys.exit(4)


def fault_seen_and_closed():
    model, opt = build(Faulty())
    try:
        step(model, opt)
    except MemoryError:
        with contextlib.suppress(RuntimeError):  # it says again that the last values are lost
            opt.close()
        opt.close()
        sys.exit(4)


def fault_unseen():
    """Nobody has read a parameter since, so nobody has met it."""
    device = Faulty()
    model, opt = build(device)
    zofftk.offload(model, opt)
    step(model, opt)


def forked_child():
    model, opt = under_way()
    pid = os.fork()
    if pid == 0:
        assert float(model[0].weight.detach().sum()) != 0.0
        sys.exit(5)  # the parent's optimizer ends here too
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    step(model, opt)


def forked_child_that_closes():
    model, opt = under_way()
    pid = os.fork()
    if pid == 0:
        opt.close()
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    step(model, opt)


def forked_after_a_fault():
    fault_unseen()
    model, opt = build(Faulty())
    zofftk.offload(model, opt)
    step(model, opt)
    pid = os.fork()
    if pid == 0:
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def in_a_spawned_child():
    under_way()


def spawned_child():
    process = torch.multiprocessing.get_context("spawn").Process(target=in_a_spawned_child)
    process.start()
    process.join()
    sys.exit(process.exitcode)


def late(hand_over=False):
    """A model whose last update is late."""
    model, opt = build(update="delayed", delay_after=0)
    if hand_over:
        zofftk.offload(model, opt)
    for _ in range(3):
        step(model, opt)
    return model, opt


def late_and_handed_over():
    late(hand_over=True)


def late_exit_3():
    _kept = late()
    sys.exit(3)


def late_exception():
    _kept = late()
    raise ValueError("of the training loop")


def late_closed():
    late()[1].close()


def late_forked_child():
    _kept = late()
    if (pid := os.fork()) == 0:
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


CASES = {
    "late, handed over": late_and_handed_over,
    "late, exit 3": late_exit_3,
    "late, exception": late_exception,
    "late, closed": late_closed,
    "late, forked child": late_forked_child,
    "normal": normal,
    "exception": exception,
    "exit 3": exit_3,
    "kept by a module": kept_by_a_module,
    "exception under way": exception_under_way,
    "closed under way": closed_under_way,
    "fault seen": fault_seen,
    "fault seen and closed": fault_seen_and_closed,
    "fault unseen": fault_unseen,
    "forked child": forked_child,
    "forked child that closes": forked_child_that_closes,
    "forked after a fault": forked_after_a_fault,
    "spawned child": spawned_child,
}


def outcome(pid: int, errors: str, start_s: float) -> tuple[int | str, float, str]:
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > start_s + HANGS_AFTER_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs", HANGS_AFTER_S, Path(errors).read_text()
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, time.monotonic() - start_s, Path(errors).read_text()


if __name__ == "__main__":
    torch.set_num_threads(1)
    under_way(0.0)[1].close()  # has everything imported, and leaves no thread
    gc.freeze()
    for name in sys.argv[1:] or CASES:
        errors, start_s = tempfile.mkstemp()[1], time.monotonic()
        if (pid := os.fork()) == 0:
            os.dup2(os.open(errors, os.O_WRONLY), 2)
            CASES[name]()
            break  # to the end of the program
        print(json.dumps([name, *outcome(pid, errors, start_s)]), flush=True)
        os.unlink(errors)
