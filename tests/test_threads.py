"""The thread planner, and what reaches it from the system."""

import os
import subprocess
import sys

import pytest

from zofftk.threads import binding_variable, cgroup_quota, plan_threads, usable_threads


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
