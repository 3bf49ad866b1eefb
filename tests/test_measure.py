"""`zofftk doctor --measure`: the numbers of this machine, and the lines that are laid through them."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
from rich.console import Console

from tests.test_device_conformance import fake_cuda
from zofftk import cli, measure
from zofftk.device.emulated import EmulatedDevice
from zofftk.measure import Product, fit_products, measure_adam_ns, measure_link, measure_task_us
from zofftk.profile import load_profile


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "BUDGET_S", 0.0)
    monkeypatch.setattr(measure, "COPY_BYTES", 4_000_000)
    monkeypatch.setattr(measure, "SMALL_SIZES", (32, 64, 128))


def seconds(size, rate, half):
    return (2 * size**3 + half * 3 * size**2) / rate


def test_the_curve_of_products_is_found_again():
    products = [Product(size, seconds(size, 5e13, 300)) for size in (1024, 2048, 4096)]
    assert fit_products(products) == pytest.approx((5e13, 300))


def test_products_of_one_speed_have_no_half():
    assert fit_products([Product(size, 2 * size**3 / 1e12) for size in (256, 512)]) == pytest.approx((1e12, 0.0))


def test_small_products_that_are_faster_do_not_make_a_curve():
    assert fit_products([Product(64, 2 * 64**3 / 2e12), Product(512, 2 * 512**3 / 1e12)]) == pytest.approx((1e12, 0.0))


def test_a_slow_small_product_does_not_promise_more_than_twice_what_was_seen():
    rate, _ = fit_products([Product(64, 1.0), Product(512, 2 * 512**3 / 1e12)])
    assert rate == pytest.approx(2e12)


def test_a_link_of_known_speed(no_threads_left):
    device = EmulatedDevice(down_gb_s=0.2, up_gb_s=0.1)
    link = measure_link(device)
    device.close()
    # Never faster than its cap, but for the latency that is taken off; slower where the machine is busy.
    assert 0.1 < link.down_gb_s < 0.24
    assert 0.05 < link.up_gb_s < 0.12
    assert 0 < link.latency_us < 5000


def test_the_cuda_device_s_link_is_measured_alike(no_threads_left):
    device = fake_cuda()
    link = measure_link(device)
    assert min(link.down_gb_s, link.up_gb_s, link.latency_us, measure_task_us(device)) > 0
    device.close()


def test_a_task_and_an_update(no_threads_left):
    device = EmulatedDevice()
    assert 0 < measure_task_us(device) < 50_000
    device.close()
    assert 0.01 < measure_adam_ns(1 << 20) < 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")
def test_the_command_saves_a_profile(monkeypatch, capsys, no_threads_left):
    monkeypatch.setattr(measure, "ADAM_NUMEL", 1 << 16)
    monkeypatch.setattr("zofftk.doctor.CHECKS", ())
    assert cli.main(["doctor", "--measure"]) == 0
    said = capsys.readouterr().out
    profile = load_profile("this")
    assert profile.name == "this machine's CPU"
    assert profile.gpu.reserved_gib == 0
    assert f"Adam {profile.host.adam_ns_per_param:.3g} ns a parameter" in said
    assert "Saved as the profile 'this': " in said


def test_without_measure_nothing_is_saved(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("zofftk.doctor.CHECKS", ())
    assert cli.main(["doctor"]) == 0
    assert not list(tmp_path.iterdir())


def test_lines_are_as_long_as_they_are(monkeypatch, no_threads_left):
    monkeypatch.setattr(measure, "measure_profile", lambda: load_profile("v100-dgx2"))
    console = Console(file=StringIO(), width=20)
    measure.measure_this(console)
    assert "Adam 0.26 ns a parameter, memory 1397.0 GiB at 256 GB/s\n" in console.file.getvalue()
