"""The thread planner, and what reaches it from the system."""

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.fake_sys import fake_sys
from zofftk import _cpu_adam, threads
from zofftk.cores import cores_of_rank
from zofftk.threads import binding_variable, cgroup_cores, cgroup_quota, plan_threads, rank_share, usable_threads


@pytest.mark.parametrize(
    ("cores", "ranks", "allowed", "omp", "expected"),
    [
        (16, 1, 16, None, 16), (16, 2, 16, "1", 8), (16, 8, 2, "1", 2), (8, 1, 1, None, 1), (4, 8, 4, None, 1),
        (16, 1, 16, "4", 4), (16, 1, 16, "4,2", 4), (16, 1, 16, "rubbish", 16), (16, 1, 16, "", 16),
    ],
)  # fmt: skip
def test_b27_plan(cores, ranks, allowed, omp, expected):
    assert plan_threads(cores, ranks, allowed, omp) == expected


def test_cgroup_v2_takes_the_smallest_on_the_way_up(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert cgroup_quota(tmp_path, membership) == 2.5


def test_cgroup_v1(tmp_path):
    group = tmp_path / "cpu,cpuacct" / "job"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("300000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    membership = tmp_path / "membership"
    membership.write_text("5:memory:/job\n3:cpu,cpuacct:/job\n")
    assert cgroup_quota(tmp_path, membership) == 3.0


def test_cgroup_without_limit(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("0::/../elsewhere\n")
    assert cgroup_quota(tmp_path, membership) is None
    assert cgroup_quota(tmp_path, tmp_path / "absent") is None


def test_cgroup_cores_are_those_of_the_nearest_group_that_tells(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("5:cpuset:/job/step\n0::/a/b\n")
    assert cgroup_cores(tmp_path, membership) is None
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "cpuset.cpus.effective").write_text("0-7\n")
    assert cgroup_cores(tmp_path, membership) == set(range(8))
    (tmp_path / "a" / "cpuset.cpus.effective").write_text("2-3,6\n")
    (tmp_path / "a" / "b" / "cpuset.cpus.effective").write_text("\n")
    assert cgroup_cores(tmp_path, membership) == {2, 3, 6}
    (tmp_path / "cpuset").mkdir()
    (tmp_path / "cpuset" / "cpuset.effective_cpus").write_text("4-5\n")
    assert cgroup_cores(tmp_path, membership) == {4, 5}
    assert cgroup_cores(tmp_path, tmp_path / "absent") is None


@pytest.mark.parametrize("lines", ["", "\n", "x", "1:2", ":::", "0::", "0::/../..", "\0:\0:\0"])
def test_memberships_that_make_no_sense(tmp_path, lines):
    membership = tmp_path / "membership"
    membership.write_text(lines)
    assert (cgroup_cores(tmp_path, membership), cgroup_quota(tmp_path, membership)) == (None, None)
    membership.write_bytes(b"0::/\xff\xfe")
    assert (cgroup_cores(tmp_path, membership), cgroup_quota(tmp_path, membership)) == (None, None)


@pytest.fixture
def eight_cores(tmp_path, monkeypatch):
    """Two nodes of four cores, one GPU next to each, for two ranks as torchrun starts them; gives /sys."""
    monkeypatch.setattr(threads, "mask_cores", lambda: set(range(8)))
    monkeypatch.setattr(threads, "cgroup_cores", lambda: None)
    monkeypatch.setattr(threads, "cgroup_quota", lambda: None)
    for name, value in (("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    gpus = {"0000:3b:00.0": "1", "0000:5e:00.0": "0"}
    return fake_sys(tmp_path, nodes={0: "0-3", 1: "4-7"}, online="0-7", gpus=gpus)


def fake_cupy(monkeypatch, pci_ids):
    """CuPy with these GPUs, or, for None, without a driver."""

    def count():
        if pci_ids is None:
            raise RuntimeError("cudaErrorInsufficientDriver")
        return len(pci_ids)

    module = ModuleType("cupy.cuda")
    vars(module)["runtime"] = SimpleNamespace(getDeviceCount=count, deviceGetPCIBusId=lambda index: pci_ids[index])
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", module)


def share(root, ask_cuda=False):
    found = rank_share(ask_cuda=ask_cuda, root=root)
    return found.threads, found.cores, found.split


def test_a_rank_of_two(eight_cores, monkeypatch):
    assert share(eight_cores) == (4, {0, 1, 2, 3}, True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert share(eight_cores) == (4, {4, 5, 6, 7}, True)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share(eight_cores) == (3, {4, 5, 6, 7}, True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert share(eight_cores) == (1, {1}, True)


@pytest.mark.parametrize("rank", ["", "2", "-1", "x", "1" * 5000])
def test_a_rank_without_a_number_splits_nothing(eight_cores, monkeypatch, rank):
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert share(eight_cores) == (4, set(range(8)), False)
    monkeypatch.delenv("LOCAL_RANK")
    assert share(eight_cores) == (4, set(range(8)), False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert share(eight_cores) == (8, set(range(8)), False)


def test_ranks_share_what_their_control_group_has(eight_cores, monkeypatch):
    monkeypatch.setattr(threads, "cgroup_quota", lambda: 6.5)
    assert share(eight_cores) == (3, {0, 1, 2, 3}, True)
    monkeypatch.setattr(threads, "cgroup_quota", lambda: 0.5)
    assert share(eight_cores) == (1, {0, 1, 2, 3}, True)
    monkeypatch.setattr(threads, "cgroup_quota", lambda: None)
    monkeypatch.setattr(threads, "mask_cores", lambda: {2, 3, 4, 5})
    assert share(eight_cores) == (4, {2, 3, 4, 5}, False)  # by a launcher
    monkeypatch.setattr(threads, "cgroup_cores", lambda: {2, 3, 4, 5})
    assert share(eight_cores) == (2, {2, 3}, True)  # by the control group, all ranks alike


def test_ranks_are_near_their_gpus(eight_cores, monkeypatch):
    fake_cupy(monkeypatch, ["0000:3B:00.0", "0000:5E:00.0"])
    assert share(eight_cores) == (4, {0, 1, 2, 3}, True)
    found = rank_share(ask_cuda=True, root=eight_cores)
    assert (found.threads, found.cores, found.gpu, found.gpu_node) == (4, {4, 5, 6, 7}, "0000:3B:00.0", 1)
    fake_cupy(monkeypatch, ["0000:5E:00.0"])  # its own only: the other rank's may be there as well
    found = rank_share(ask_cuda=True, root=eight_cores)
    assert (found.threads, found.cores, found.gpu, found.gpu_node) == (4, {0, 1, 2, 3}, "0000:5E:00.0", 0)
    fake_cupy(monkeypatch, ["0000:3B:00.0", "0000:3B:00.0", "0000:5E:00.0"])
    assert share(eight_cores, ask_cuda=True) == (2, {4, 5}, True)


def test_a_cupy_that_fails_is_none(eight_cores, monkeypatch):
    fake_cupy(monkeypatch, None)
    found = rank_share(ask_cuda=True, root=eight_cores)
    assert (found.cores, found.gpu, found.gpu_node) == ({0, 1, 2, 3}, "", None)


@pytest.mark.parametrize(("ranks", "cuda", "asked"), [("2", True, True), ("2", False, False), ("1", True, False)])
def test_the_default_asks_for_the_gpus_of_several_ranks_alone(eight_cores, monkeypatch, ranks, cuda, asked):
    calls, bound = [], []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    monkeypatch.setattr(threads, "_pci_ids", lambda: calls.append(1) or [])
    monkeypatch.setattr(_cpu_adam, "set_worker_cores", bound.append)
    assert usable_threads.__wrapped__() >= 1
    assert len(calls) == asked
    assert len(bound) == (ranks == "2")


RANK = """
import hashlib, json, os, torch
torch.set_num_threads(1)
before = os.sched_getaffinity(0), torch.get_num_threads()
from zofftk import _cpu_adam
from zofftk.cpu_adam import adamw_step
from zofftk.threads import usable_threads
def masks():
    return {task: os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}
planned, others = usable_threads(), masks()
p, g = torch.ones(100_000), torch.linspace(-1, 1, 100_000)
adamw_step(p, torch.zeros_like(p), torch.zeros_like(p), g, step=1, lr=.1, threads=3)  # more than the rank has
workers = [mask for task, mask in masks().items() if task not in others]
assert before == (os.sched_getaffinity(0), torch.get_num_threads()) and len(workers) == 2
print(json.dumps([planned, [sorted(mask) for mask in workers], hashlib.sha256(p.numpy().tobytes()).hexdigest()]))
"""


def test_ranks_run_on_their_cores():
    mask = os.sched_getaffinity(0)

    def run(rank, ranks):
        env = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        result = subprocess.run([sys.executable, "-c", RANK], env=env, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        planned, workers, digest = json.loads(result.stdout)
        expected = cores_of_rank(mask, rank, ranks, granted=cgroup_cores())
        assert workers == [sorted(expected)] * 2
        return planned, expected, digest

    runs = [run(0, 1), run(0, 2), run(1, 2)]
    assert len({digest for _, _, digest in runs}) == 1
    (alone, all_cores, _), *shares = runs
    assert all_cores == mask
    for planned, cores, _ in shares:
        assert planned == max(1, alone // 2)
        assert planned <= len(cores) <= len(mask)


def test_binding_variable():
    assert binding_variable(8, 1, {"KMP_AFFINITY": "compact"}) == "KMP_AFFINITY"
    assert binding_variable(8, 1, {}) is None
    assert binding_variable(8, 2, {"KMP_AFFINITY": "compact"}) is None
    assert binding_variable(1, 1, {"OMP_PROC_BIND": "true"}) is None


def test_usable_threads_stays_within_the_mask():
    assert 1 <= usable_threads() <= len(os.sched_getaffinity(0))


CHILD = """
import hashlib, os, warnings, torch
warnings.simplefilter("always")
before = os.sched_getaffinity(0), torch.get_num_threads()
from zofftk import _cpu_adam
from zofftk.cpu_adam import adamw_step
p, g = torch.ones(1_000_000), torch.linspace(-1, 1, 1_000_000)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    adamw_step(p, torch.zeros_like(p), torch.zeros_like(p), g, step=1, lr=.1)
    adamw_step(torch.ones(4), torch.zeros(4), torch.zeros(4), torch.ones(4), step=1, lr=.1)
assert before == (os.sched_getaffinity(0), torch.get_num_threads())
messages = "".join(str(w.message) for w in caught)
print(_cpu_adam.worker_count() + 1, len(before[0]), len(caught), messages.count("KMP_AFFINITY"))
print(hashlib.sha256(p.numpy().tobytes()).hexdigest())
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_b16_affinity():
    def run(prefix=(), **variables):
        env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OMP_PROC_BIND")}
        env |= {"GOMP_SPINCOUNT": "1000"}  # torch's threads would spin on the cores that are counted here
        command = [*prefix, sys.executable, "-c", CHILD]
        result = subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        counts, digest = result.stdout.splitlines()[-2:]
        return [int(word) for word in counts.split()], digest

    one_core = (
        sys.executable,
        "-c",
        "import os,sys; os.sched_setaffinity(0,{min(os.sched_getaffinity(0))}); os.execv(sys.argv[1], sys.argv[1:])",
    )
    runs = [
        # Each runtime reads its own variable: GNU's the one, Intel's the other.
        run(KMP_AFFINITY="granularity=fine,compact,1,0", GOMP_CPU_AFFINITY="0"), run(one_core),
        run(OMP_NUM_THREADS="1"), run(one_core, KMP_AFFINITY="granularity=fine,compact"),
    ]  # fmt: skip
    assert len({digest for _, digest in runs}) == 1
    for (workers, mask, _, _), _ in runs:
        assert workers <= mask
    assert runs[1][0] == [1, 1, 0, 0]
    assert runs[2][0][0] == usable_threads()
    assert runs[3][0] == [1, 1, 1, 2]  # one warning, which names the variable (twice)
