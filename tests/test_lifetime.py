"""How it ends: processes, threads, hooks and memory; and what becomes of an exception in a stream or a hook."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import zofftk
from tests.test_pending import SlowUpdates, stepped
from zofftk.device.emulated import EmulatedDevice
from zofftk.errors import StoppedError

pytestmark = pytest.mark.usefixtures("no_threads_left")
ROOT = Path(__file__).parent.parent


# -- processes -----------------------------------------------------------------------------------------------------

ENDINGS = {"normal": 0, "exception": 1, "exit 3": 3}
MORE_ENDINGS = {
    "kept by a module": 0,
    "exception under way": 1,
    "closed under way": 0,
    "fault seen": 4,
    "fault seen and closed": 4,
    "fault unseen": 0,
    "forked child": 0,
    "forked child that closes": 0,
    "forked after a fault": 0,
    "spawned child": 0,
}


@pytest.mark.parametrize(
    "expected", [ENDINGS, pytest.param(MORE_ENDINGS, marks=pytest.mark.slow)], ids=["three", "more"]
)
def test_b42_processes_end(expected):
    command = [sys.executable, "-W", "error", "-m", "tests.programs.endings", *expected]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    outcomes = {name: rest for name, *rest in map(json.loads, result.stdout.splitlines())}
    assert {name: outcome[0] for name, outcome in outcomes.items()} == expected
    for name, (_, seconds, errors) in outcomes.items():
        assert seconds < 10 or name == "spawned child"  # whose own imports take seconds
        if "exception" in name:
            assert errors.startswith("Traceback")
            assert errors.endswith("ValueError: of the training loop\n")
            assert errors.count("Traceback") == 1
        else:
            assert errors == "", name


def test_b42_close_gives_every_thread_back():
    def native_threads():
        return set(os.listdir("/proc/self/task"))

    model = nn.Linear(512, 512)
    model(torch.ones(2, 512)).sum().backward()  # makes autograd's own
    model.zero_grad()
    before = native_threads()
    opt = zofftk.OffloadAdamW(model.parameters(), threads=3)
    zofftk.offload(model, opt)
    model(torch.ones(2, 512)).sum().backward()
    opt.step()
    assert len(native_threads() - before) >= 3
    opt.close()
    opt.close()
    end = time.monotonic() + 5
    while native_threads() - before and time.monotonic() < end:
        time.sleep(0.01)  # the system needs a moment
    assert not native_threads() - before
    with pytest.raises(RuntimeError, match="this optimizer is closed"):
        opt.step()


def test_the_kernels_make_new_threads_after_another_optimizer_has_ended_them():
    from zofftk import _cpu_adam

    p, q = (nn.Parameter(torch.ones(100_000)) for _ in range(2))
    opt, other = (zofftk.OffloadAdamW([x], threads=3, lr=0.1, weight_decay=0.0) for x in (p, q))
    for x, o in ((p, opt), (q, other)):
        x.grad = torch.ones_like(x)
        o.step()
    assert _cpu_adam.worker_count() >= 1
    opt.close()
    assert _cpu_adam.worker_count() == 0
    other.step()
    assert _cpu_adam.worker_count() >= 1
    other.close()


B34 = """
import ctypes, gc, weakref, torch, zofftk
from pathlib import Path
torch.set_num_threads(1)

def resident():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

references, sizes = [], []
survivor = torch.nn.Parameter(torch.ones(64))
for turn in range(20):
    p = torch.nn.Parameter(torch.full((4 << 20,), 1.0))
    opt = zofftk.OffloadAdamW([p, survivor], lr=0.1)
    (p.sum() + survivor.sum()).backward()
    opt.step()
    if turn % 2:  # without close(), too
        opt.close()
    references += [weakref.ref(p), weakref.ref(opt)]
    del p, opt
    gc.collect()
    if turn == 0:
        gc.freeze()  # what was imported need not be gone through each time
    survivor.grad = None
    ctypes.CDLL(None).malloc_trim(0)  # the C library keeps pieces of up to 32 MB for later; that is no growth
    sizes.append(resident())
print(sizes[19] - sizes[4], sum(reference() is not None for reference in references))
"""


def test_b34_optimizers_made_again_and_again_leave_nothing():
    said = subprocess.run([sys.executable, "-c", B34], check=True, capture_output=True, text=True, timeout=120).stdout
    grown, alive = map(int, said.split())
    assert grown < 10e6
    assert alive == 0


def test_b34_no_hook_is_left_on_a_parameter_that_survives():
    model = nn.Linear(4, 4)
    for _ in range(3):
        opt = zofftk.OffloadAdamW(model.parameters())
        overlap = zofftk.offload(model, opt)
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
        opt.close()
        overlap.remove()
    reference = weakref.ref(opt)
    del opt, overlap
    gc.collect()
    assert reference() is None
    assert not model._forward_pre_hooks
    for p in model.parameters():
        assert not p._post_accumulate_grad_hooks
        assert type(p) is nn.Parameter
        assert type(p.grad) in (type(None), torch.Tensor)


# -- faults --------------------------------------------------------------------------------------------------------


class Faulty(EmulatedDevice):
    """Fails in operations whose label begins so, from the second step on."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label, self.armed = label, False

    def _fails(self, label):
        return self.armed and label.startswith(self.label)

    def _pack(self, label, *args):
        if self._fails(label):
            raise_here(label)
        super()._pack(label, *args)

    def _copy_back(self, label, *args):
        if self._fails(label):
            raise_here(label)
        super()._copy_back(label, *args)

    def _copy(self, stream, label, *args):
        if self._fails(label):
            self._enqueue(stream, lambda: raise_here(label))
        super()._copy(stream, label, *args)

    def _host_task(self, label, task):
        super()._host_task(label, (lambda: raise_here(label)) if self._fails(label) else task)


def raise_here(label):
    raise OSError(f"bad memory in {label}")


def two_steps(model, opt):
    """What runs behind a step may be told at the next."""
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        opt.step()
        opt.zero_grad()


def assert_raised_here(caught):
    assert "raise_here" in [frame.name for frame in traceback.extract_tb(caught.tb)]


@pytest.mark.parametrize("label", ["pack", "down", "norm", "adam", "up"])
@pytest.mark.parametrize("handed_over", [False, True])
def test_a_fault_reaches_the_training_thread_with_its_own_traceback(label, handed_over):
    device = Faulty(label)
    model, opt = stepped(handed_over, device=device)
    opt.zero_grad()
    model(torch.ones(2, 8)).sum()  # everything has landed
    device.armed = True
    with pytest.raises(OSError, match=f"bad memory in {label}") as caught:
        two_steps(model, opt)
    assert_raised_here(caught)
    opt.zero_grad()
    with pytest.raises((OSError, StoppedError), match=f"bad memory in {label}"):
        two_steps(model, opt)
    with contextlib.suppress(StoppedError):  # where values were on their way: they are lost
        opt.close()
    opt.close()
    model(torch.ones(2, 8))


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_fault_in_the_copy_back_is_met_by_everyone_who_reads(handed_over):
    """It is in the reader's own thread, and what it left is as it was before."""
    device = Faulty("copy back")
    model, opt = stepped(handed_over, device=device)
    opt.zero_grad()
    model(torch.ones(2, 8)).sum()
    device.armed = True
    with pytest.raises(OSError, match="bad memory in copy back") as caught:
        two_steps(model, opt)
    assert_raised_here(caught)
    for act in (opt.synchronize, opt.close):
        with pytest.raises(OSError, match="bad memory in copy back") as caught:
            act()
        assert_raised_here(caught)
    opt.close()
    model(torch.ones(2, 8))


@pytest.mark.parametrize("numel", [8, 1 << 15])
def test_a_fault_in_a_hook_is_raised_in_backward_or_where_its_gradient_is_taken(monkeypatch, numel):
    p = nn.Parameter(torch.ones(numel))
    opt = zofftk.OffloadAdamW([p])
    monkeypatch.setattr("zofftk.engine.Engine._gather", lambda *_: raise_here("gather"))

    def train():
        p.sum().backward()
        assert numel < 1 << 14, "a large gradient is taken in backward"
        opt.step()

    with pytest.raises(OSError, match="bad memory in gather") as caught:
        train()
    assert_raised_here(caught)
    monkeypatch.undo()
    opt.close()


def test_a_fault_that_a_fork_meets_is_kept_for_the_training_thread():
    class FailsLate(SlowUpdates):
        def _host_task(self, label, task):
            super()._host_task(label, (lambda: raise_here(label)) if label.startswith("adam") else task)

    model, opt = stepped(device=FailsLate())
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(OSError, match="bad memory in adam") as caught:
        model(torch.ones(2, 8))
    assert_raised_here(caught)
    with pytest.raises(StoppedError, match="bad memory in adam"):
        opt.synchronize()
    opt.close()
