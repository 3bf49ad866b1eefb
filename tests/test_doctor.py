import sys
from io import StringIO
from types import ModuleType

import pytest
from rich.console import Console

from zofftk import doctor, threads
from zofftk.doctor import Check, check_cores, check_cpu_adam, check_cupy, check_memory, check_page_locked, run_doctor
from zofftk.host_memory import cgroup_memory_limit


def shown(monkeypatch, *checks: Check) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "CHECKS", [lambda check=check: check for check in checks])
    console = Console(file=StringIO(), width=100)
    return run_doctor(console), console.file.getvalue()


def fake_module(monkeypatch, name: str, **contents) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_lists_every_check_with_one_line_of_advice_for_each_thing_missing(monkeypatch):
    checks = [check() for check in doctor.CHECKS]
    assert len({check.name for check in checks}) == len(checks) == 9
    code, text = shown(monkeypatch, *checks)
    for check in checks:
        assert check.name in text
        assert "\n" not in check.advice
        assert not check.advice or f"{check.name}: {check.advice}\n" in text
    assert code == int(any(check.required and check.advice for check in checks))


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (Check("GPU", "none", "get one"), 0),
        (Check("CPU Adam", "none", "build it", required=True), 1),
        (Check("CPU Adam", "avx2"), 0),
    ],
)
def test_only_what_is_required_fails(monkeypatch, check, code):
    assert shown(monkeypatch, check)[0] == code


def test_cpu_adam_names_the_instruction_set_in_use(monkeypatch):
    fake_module(monkeypatch, "zofftk._cpu_adam", isa=lambda: "avx2", available_isas=lambda: ["avx2", "scalar"])
    assert check_cpu_adam() == Check("CPU Adam", "avx2 (this CPU can: avx2, scalar)")


def test_a_missing_extension_is_required_and_advised(monkeypatch):
    monkeypatch.setitem(sys.modules, "zofftk._cpu_adam", None)
    check = check_cpu_adam()
    assert check.required
    assert "pip install" in check.advice


def test_an_instruction_set_that_cannot_be_is_a_failed_check(monkeypatch):
    def unknown():
        raise ValueError("unknown instruction set 'bogus'")

    fake_module(monkeypatch, "zofftk._cpu_adam", isa=unknown)
    check = check_cpu_adam()
    assert check.required
    assert check.found == "not usable: unknown instruction set 'bogus'"
    assert "ZOFFTK_ISA" in check.advice


def test_cores_fewer_than_the_machine_has(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    fake_module(monkeypatch, "zofftk.threads", usable_threads=lambda: 8)
    check = check_cores()
    assert check.found == "8 of 64"
    assert "affinity" in check.advice


def test_the_cores_of_a_rank(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("zofftk.cores.node_cores", lambda: {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shares = iter([
        threads.RankShare(0, 2, 4, {0, 1, 2, 3}, True, "0000:3B:00.0", 0),
        threads.RankShare(1, 2, 4, {0, 2, 4, 6}, True, "0000:5E:00.0", None),
        threads.RankShare(-1, 2, 4, set(range(8)), False, "", None),
    ])  # fmt: skip
    monkeypatch.setattr(threads, "rank_share", lambda ask_cuda: next(shares))
    assert check_cores() == Check("cores", "4 of 8 for local rank 0 of 2: on 0-3, node 0; GPU 0000:3B:00.0 at node 0")
    found = "4 of 8 for local rank 1 of 2: on 0,2,4,6, node 0-1; GPU 0000:5E:00.0 at node unknown"
    assert check_cores() == Check("cores", found)
    found = "4 of 8 for local rank unknown (set LOCAL_RANK) of 2: on 0-7, node 0-1, not split"
    assert check_cores() == Check("cores", found)


def test_the_cores_of_a_rank_on_this_machine(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    check = check_cores()
    assert "for local rank 1 of 2: " in check.found
    assert not check.advice


def test_memory_below_the_machine_s(monkeypatch):
    monkeypatch.setattr(doctor, "physical_memory", lambda: 64 << 30)
    monkeypatch.setattr(doctor, "usable_memory", lambda: 16 << 30)
    check = check_memory()
    assert check.found == "16.0 GiB, room for states of about 1.1B parameters"
    assert "cgroup limit leaves 16.0 of 64.0 GiB" in check.advice


def test_the_lowest_limit_up_the_cgroup_tree_counts(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert cgroup_memory_limit(tmp_path, own) is None
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    assert cgroup_memory_limit(tmp_path, own) is None
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    assert cgroup_memory_limit(tmp_path, own) == 1000
    (tmp_path / "a" / "b" / "memory.max").write_text("500\n")
    assert cgroup_memory_limit(tmp_path, own) == 500


def test_version_1_cgroups(tmp_path):
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/y\n")
    (tmp_path / "memory" / "y").mkdir(parents=True)
    (tmp_path / "memory" / "y" / "memory.limit_in_bytes").write_text("700\n")
    assert cgroup_memory_limit(tmp_path, own) == 700


@pytest.mark.parametrize(
    ("limit", "found", "advised"),
    [(-1, "no limit", False), (8 << 20, "at most 0.01 GiB", True), (8 << 30, "at most 8.00 GiB", False)],
)
def test_the_page_locked_limit(monkeypatch, limit, found, advised):
    monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
    check = check_page_locked()
    assert check.found == found
    assert bool(check.advice) == advised


def test_a_broken_cupy_is_told_from_a_missing_one(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert check_cupy().found == "not installed"
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert "libcuda is missing" in check_cupy().found
