"""Profiles of machines: those that come with the package, one's own, and what is wrong with one."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from zofftk import profile as profiles
from zofftk.device.base import DOWN, UP, Work
from zofftk.errors import InputError
from zofftk.profile import load_profile, parse_profile, profile_names, this_path, write_profile
from zofftk.virtual.durations import Durations

FOLDER = Path(profiles.__file__).parent / "profiles"
PACKAGED = ["a100", "gh200", "h100", "h200", "laptop24", "rtx4090", "v100-dgx2"]
V100 = load_profile("v100-dgx2")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def values():
    return tomllib.loads((FOLDER / "v100-dgx2.toml").read_text())


def test_the_packaged_ones_are_these():
    assert profile_names() == PACKAGED


@pytest.mark.parametrize("name", PACKAGED)
def test_each_is_read_and_says_where_every_number_is_from(name):
    profile = load_profile(name)
    assert profile.name
    assert profile.gpu.reserved_gib < profile.gpu.memory_gib
    assert profile.link.devices <= profile.interconnect.devices_per_host
    for line in (FOLDER / f"{name}.toml").read_text().splitlines():
        if "=" in line and not line.startswith("name"):
            assert len(line.partition("#")[2].strip()) > 3, line


def test_one_s_own_file(tmp_path):
    path = tmp_path / "mine.toml"
    mine = dataclasses.replace(V100, name='a "machine" of\nmy own\\')
    write_profile(mine, path, "made up", {"link.devices": "assumed"})
    for given in (path, str(path)):
        assert load_profile(given) == dataclasses.replace(mine, name='a "machine" of my own\\')
    assert path.read_text().startswith("# made up\n")
    assert "devices = 2  # assumed\n" in path.read_text()


def test_this_machine_is_known_once_it_was_measured(tmp_path):
    with pytest.raises(InputError, match="has not been measured yet: run zofftk doctor --measure"):
        load_profile("this")
    write_profile(V100, this_path(), "measured")
    assert this_path() == tmp_path / "config" / "zofftk" / "this.toml"
    assert load_profile("this") == V100
    assert profile_names() == [*PACKAGED, "this"]


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(InputError, match="profile: expected one of a100, .*v100-dgx2, or the path of a file; got 'v1'"):
        load_profile("v1")


def test_a_file_that_is_not_there_or_none(tmp_path):
    with pytest.raises(InputError, match="nowhere.toml: No such file"):
        load_profile("nowhere.toml")
    for content in (b"name = ", b"\xff"):
        (path := tmp_path / "broken.toml").write_bytes(content)
        with pytest.raises(InputError, match=f"profile: {path}: "):
            load_profile(path)


WRONG = [
    (("gpu", "peak_16bit_tflops"), "fast", "gpu.peak_16bit_tflops: expected a number, got 'fast'"),
    (("gpu", "memory_gib"), 0, "gpu.memory_gib: expected a number above 0, got 0"),
    (("gpu", "max_efficiency"), 1.5, "gpu.max_efficiency: expected a share of at most 1, got 1.5"),
    (("gpu", "kernel_us"), -1.0, "gpu.kernel_us: expected a number above 0, got -1.0"),
    (("link", "devices"), 1.5, "link.devices: expected a whole number, got 1.5"),
    (("link", "devices"), True, "link.devices: expected a whole number, got True"),
    (("link", "up_gb_s"), float("inf"), "link.up_gb_s: expected a number, got inf"),
    (("link", "left_gb_s"), 1.0, "link.left_gb_s: unknown, expected devices, down_gb_s, latency_us, up_gb_s"),
    (("host",), 3, "host: expected a table, got 3"),
    (("name",), 3, "name: expected a text, got 3"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_the_first_wrong_entry_is_named(place, value, message):
    wrong = values()
    table = wrong
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    with pytest.raises(InputError) as caught:
        parse_profile(wrong)
    assert str(caught.value) == message


@pytest.mark.parametrize(("section", "name"), [("host", "memory_gib"), (None, "link")])
def test_what_is_missing_is_named(section, name):
    wrong = values()
    del (wrong[section] if section else wrong)[name]
    with pytest.raises(InputError, match=f"{section}.{name}: missing" if section else f"{name}: missing"):
        parse_profile(wrong)


def test_some_entries_may_be_missing(tmp_path):
    gpu = parse_profile(values()).gpu
    assert (gpu.attention_tflops, gpu.is_host) == (0, False)
    host = replaced(is_host=True, attention_tflops=0.125)
    write_profile(host, tmp_path / "host.toml", "a test's")
    assert load_profile(tmp_path / "host.toml") == host
    wrong = values()
    wrong["gpu"]["is_host"] = 1
    with pytest.raises(InputError, match="gpu.is_host: expected true or false, got 1"):
        parse_profile(wrong)


def test_nothing_may_take_no_time():
    free = values()
    for section, name in [
        ("gpu", "kernel_us"),
        ("gpu", "half_intensity"),
        ("gpu", "work_exponent"),
        ("link", "latency_us"),
        ("host", "task_us"),
    ]:
        free[section][name] = 0
    assert parse_profile(free).gpu.kernel_us == 0


# -- what durations are made of a profile ----------------------------------------------------------------------------


def test_large_products_come_near_to_the_peak_and_small_ones_do_not():
    durations, gpu = Durations(V100), V100.gpu

    def efficiency(size):
        flops, elements = 2 * size**3, 3 * size**2
        ns = durations.compute_ns(flops, elements, 2 * elements, wide=False) - gpu.kernel_us * 1e3
        return flops / ns / (gpu.peak_16bit_tflops * 1e3)

    assert efficiency(1 << 20) == pytest.approx(gpu.max_efficiency, rel=1e-3)
    half = round(1.5 * gpu.half_intensity)  # 2 n^3 / 3 n^2 is half_intensity
    assert efficiency(half) == pytest.approx(gpu.max_efficiency / 2, rel=1e-2)
    assert efficiency(64) < 0.2 * gpu.max_efficiency


def test_efficiency_grows_with_the_work_of_a_product_where_a_profile_says_so():
    gpu = dataclasses.replace(V100.gpu, half_intensity=0.0, kernel_us=0.0, max_efficiency=0.4, work_exponent=0.1)
    durations = Durations(dataclasses.replace(V100, gpu=gpu))

    def efficiency(flops):
        return flops / durations.compute_ns(flops, 1, 1, wide=False) / (gpu.peak_16bit_tflops * 1e3)

    assert efficiency(10**12) == pytest.approx(0.4, rel=1e-6)
    assert efficiency(10**9) == pytest.approx(0.4 / 1000**0.1, rel=1e-3)
    assert efficiency(10**18) == pytest.approx(1.0, rel=1e-6)  # 0.4 * 4.0 would be more than the peak
    assert durations.compute_ns(0, 1, 9_000, wide=False) == durations.move_ns(9_000)


def replaced(**of_gpu):
    return dataclasses.replace(V100, gpu=dataclasses.replace(V100.gpu, **of_gpu))


def test_fused_attention_may_have_a_speed_of_its_own():
    own = Durations(replaced(attention_tflops=10.0))
    kernel_ns = V100.gpu.kernel_us * 1e3
    assert own.compute_ns(10**10, 10, 20, wide=False, is_attention=True) == round(1e6 + kernel_ns)
    for wide in (False, True):  # 0: as products; and never above the peak
        fast = Durations(replaced(attention_tflops=1e6))
        as_products = Durations(V100).compute_ns(10**10, 10, 20, wide=wide)
        assert Durations(V100).compute_ns(10**10, 10, 20, wide=wide, is_attention=True) == as_products
        assert fast.compute_ns(10**10, 10, 20, wide=wide, is_attention=True) == pytest.approx(as_products, rel=1e-3)
        assert own.compute_ns(10**10, 10, 20, wide=wide) == as_products


def test_ranks_share_a_device_that_is_the_host():
    host = replaced(is_host=True, attention_tflops=1.0)
    half = host.shared_by(2)
    assert half.gpu.peak_16bit_tflops == V100.gpu.peak_16bit_tflops / 2
    assert half.gpu.attention_tflops == 0.5
    assert half.interconnect.devices_per_host == 2
    assert half.host == host.host  # an update has all cores, and each rank a part of it
    assert host.shared_by(1) is host
    assert V100.shared_by(2) is V100


def test_an_operation_takes_as_long_as_its_memory_at_least():
    ns = Durations(V100).compute_ns(1, 1, 720_000_000, wide=True)
    assert ns == round(1e6 + V100.gpu.kernel_us * 1e3)  # 900 GB/s, of which 0.8


def test_ranks_share_a_host_and_its_links():
    alone, full, many = Durations(V100), Durations(V100, 16), Durations(V100, 128)
    assert [each.ranks_here for each in (alone, full, many)] == [1, 16, 16]
    assert [Durations(V100, ranks).ranks_on_link for ranks in (1, 8, 9, 16, 128)] == [1, 1, 2, 2, 2]
    task = Work(updates=1_000_000_000, nbytes=0)
    assert alone.host_ns(task) == pytest.approx(0.26e9, rel=1e-3)
    assert full.host_ns(task) == pytest.approx(16 * 0.26e9, rel=1e-3)
    for stream in (DOWN, UP):
        assert alone.copy_ns(stream, 12_000_000, 3) == 1_000_000 + 30_000
        assert full.copy_ns(stream, 12_000_000, 3) == 2_000_000 + 30_000


def test_a_ring_within_a_host_and_between_hosts():
    within, between = (Durations(V100, ranks).collective_ns(1_200_000_000, ranks) for ranks in (16, 32))
    assert within == pytest.approx(1.2e9 * 15 / 16 / 120 + 15 * 20e3)
    assert between == pytest.approx(1.2e9 * 31 / 32 / 80 + 31 * 20e3)
