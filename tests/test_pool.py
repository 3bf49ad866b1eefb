"""The thread pool: coverage of ranges, forks, concurrent callers, process exit, floating-point mode."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from tests.compare import assert_same_bits
from tests.kernel import kernel_step
from zofftk import _cpu_adam


@pytest.fixture
def small_chunks():
    _cpu_adam._set_chunk(64)
    yield
    _cpu_adam._set_chunk(0)


def child(code: str, timeout: float = 60) -> str:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr}"
    return result.stdout


@pytest.mark.parametrize("n", [1, 63, 64, 65, 64 * 3 + 5, 2**31 - 1, 2**31 + 17, 2**40 + 1])
@pytest.mark.parametrize("chunk", [64, 32768, 2**31])
def test_b41_ranges_cover_everything_once(n, chunk):
    count = _cpu_adam._chunk_count(n, chunk)
    indices = range(count) if count < 5000 else [*range(2000), *range(count - 2000, count)]
    previous = None
    for index in indices:
        begin, end = _cpu_adam._chunk_range(n, chunk, index)
        assert 0 <= begin < end <= n
        assert begin == index * chunk
        assert end - begin == (chunk if index < count - 1 else n - begin)
        if previous is not None and index == previous[0] + 1:
            assert begin == previous[1]
        previous = index, end
    assert previous == (count - 1, n)
    assert _cpu_adam._chunk_range(n, chunk, 0)[0] == 0


def test_b41_last_element_moves(small_chunks):
    n = 64 * 3 + 5
    p, m, v, g = torch.ones(n), torch.zeros(n), torch.zeros(n), torch.ones(n)
    for step in (1, 2, 3):
        kernel_step(p, m, v, g, step=step, lr=0.1, threads=3)
    assert torch.all(p == p[0])
    assert abs(p[0].item() - 0.7) < 1e-6


def test_chunk_must_be_a_multiple_of_the_widest_vector():
    with pytest.raises(ValueError, match="multiple of 64"):
        _cpu_adam._set_chunk(100)


def test_concurrent_callers(small_chunks):
    def make():
        return [torch.ones(20_000), torch.zeros(20_000), torch.zeros(20_000), torch.linspace(-1, 1, 20_000)]

    def steps(tensors, threads):
        for step in range(1, 30):
            kernel_step(*tensors, step=step, threads=threads)

    expected, results = make(), [make() for _ in range(4)]
    steps(expected, 1)
    callers = [threading.Thread(target=steps, args=(tensors, 3)) for tensors in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for tensors in results:
        for got, want in zip(tensors, expected, strict=True):
            assert_same_bits(got, want)


STEP = """
import os, signal, sys, torch
from zofftk import _cpu_adam
from zofftk.cpu_adamw import CPUAdamW
def make():
    p = torch.nn.Parameter(torch.ones(1_000_000)); p.grad = torch.ones(1_000_000)
    return p, CPUAdamW([p], lr=.1, weight_decay=0.0, threads=2)
"""


def test_b23_dataloader_forks_between_steps():
    code = STEP + textwrap.dedent("""
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return (torch.ones(512, 512) @ torch.ones(512, 512)).sum()
        p, optimizer = make()
        optimizer.step()
        loader = torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=2, multiprocessing_context="fork")
        assert len([batch for batch in loader]) == 2
        optimizer.step()
        print(p.min().item(), p.max().item(), _cpu_adam.worker_count())
    """)
    low, high, workers = child(code).split()
    assert low == high
    assert abs(float(low) - 0.8) < 1e-6
    assert workers == "1"


def test_b23_step_in_a_fork():
    code = STEP + textwrap.dedent("""
        p, optimizer = make()
        optimizer.step()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            optimizer.step()
            values = p.detach().numpy()  # torch's own threads do not survive a fork
            os._exit(0 if values.min() == values.max() and abs(values[0] - .8) < 1e-6
                     and _cpu_adam.worker_count() == 1 else 3)
        assert os.waitpid(pid, 0)[1] == 0
        optimizer.step()
        print(p.min().item() == p.max().item())
    """)
    assert child(code).split() == ["True"]


def test_exit_does_not_hang():
    assert child(STEP + "p, optimizer = make(); optimizer.step(); print('done')", timeout=30).split() == ["done"]


def test_flush_mode_of_the_caller_neither_matters_nor_changes(small_chunks):
    """torch.set_flush_denormal reaches only its own thread and those born later."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush mode")
    try:
        for threads in (1, 3):
            p, m, v, g = torch.ones(1000), torch.full((1000,), 1e-40), torch.zeros(1000), torch.zeros(1000)
            kernel_step(p, m, v, g, threads=threads)
            assert (m.view(torch.int32) == torch.tensor(9e-41).view(torch.int32)).all()
            assert (torch.tensor([1e-30]) * 1e-10).item() == 0.0  # the caller still flushes
    finally:
        torch.set_flush_denormal(False)
    assert (torch.tensor([1e-40]) * 1.0).item() != 0.0


ON_CORES = """
torch.set_num_threads(1)
mask = os.sched_getaffinity(0)
one = [str(max(mask))]
def lists_of_new_threads():
    before = set(os.listdir("/proc/self/task"))
    optimizer.step()
    new = set(os.listdir("/proc/self/task")) - before
    assert os.sched_getaffinity(0) == mask and _cpu_adam.worker_count() == len(new) == 1
    return [open(f"/proc/self/task/{task}/status").read().partition("Cpus_allowed_list:")[2].split()[0] for task in new]
p, optimizer = make()
"""


def test_workers_run_on_the_cores_they_are_given():
    """From the next call on, in those made after a release, and in a fork; and the caller stays where it is."""
    code = textwrap.dedent("""
        unbound = lists_of_new_threads()
        _cpu_adam.set_worker_cores([max(mask)])
        assert lists_of_new_threads() == one
        _cpu_adam.release_workers()
        assert lists_of_new_threads() == one
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            assert lists_of_new_threads() == one
            _cpu_adam.release_workers()
            assert lists_of_new_threads() == one
            _cpu_adam.set_worker_cores([])
            os._exit(0 if lists_of_new_threads() == unbound else 3)
        assert os.waitpid(pid, 0)[1] == 0
        _cpu_adam.set_worker_cores([1023])  # no such core: the system refuses
        assert lists_of_new_threads() == unbound
        _cpu_adam.set_worker_cores([-5, 1 << 20])
        assert lists_of_new_threads() == unbound
        print(p.min().item() == p.max().item())
    """)
    assert child(STEP + ON_CORES + code).split() == ["True"]


@pytest.mark.parametrize("cores", [None, "0", [1.5], [1 << 40]])
def test_cores_are_numbers(cores):
    with pytest.raises(TypeError):
        _cpu_adam.set_worker_cores(cores)


def test_torch_threads_stay(small_chunks):
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    kernel_step(torch.ones(1000), torch.zeros(1000), torch.zeros(1000), torch.ones(1000), threads=3)
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
