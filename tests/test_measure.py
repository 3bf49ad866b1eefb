"""`zofftk doctor --measure`: the numbers of this machine, and the lines that are laid through them."""

from __future__ import annotations

import re
from io import StringIO

import pytest
import torch
from rich.console import Console

from tests.test_device_conformance import fake_cuda
from zofftk import cli, measure, measure_device, repeat
from zofftk.device.emulated import EmulatedDevice
from zofftk.errors import InputError
from zofftk.gpt import GPT
from zofftk.gpt_config import GPTConfig
from zofftk.measure import measure_adam_ns, measure_link, measure_task_us
from zofftk.measure_device import (
    Shape,
    Timed,
    attention_of,
    bytes_per_s,
    fit_products,
    products_of,
    rate_of,
    time_models,
)
from zofftk.profile import load_profile
from zofftk.virtual.durations import Durations
from zofftk.virtual.op_costs import OpCost
from zofftk.virtual.rehearsal import Rehearsal


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(repeat, "BUDGET_S", 0.0)
    for module in (measure, measure_device):
        monkeypatch.setattr(module, "COPY_BYTES", 4_000_000)
    shapes = Shape(hidden=32, samples=2, seq=32, vocab=128), Shape(hidden=64, samples=2, seq=32, vocab=128)
    monkeypatch.setattr(measure_device, "ON_CPU", shapes)
    monkeypatch.setattr(measure_device, "MODEL_S", 0.0)


def product(size, seconds):
    cost = OpCost(2 * size**3, 3 * size**2, 6 * size**2, wide=False, is_attention=False)
    return Timed(cost, seconds)


def test_the_curve_of_products_is_found_again():
    products = [product(size, (2 * size**3 + 300 * 3 * size**2) / 5e13) for size in (1024, 2048, 4096)]
    assert fit_products(products) == pytest.approx((5e13, 300))
    assert rate_of(products, 300) == pytest.approx(5e13)


def test_products_of_one_speed_have_no_half():
    rate, half = fit_products([product(size, 2 * size**3 / 1e12) for size in (256, 512)])
    assert (rate, half) == pytest.approx((1e12, 0.0), abs=1e-3)


def test_small_products_that_are_faster_do_not_make_a_curve():
    products = [product(64, 2 * 64**3 / 2e12), product(512, 2 * 512**3 / 1e12)]
    rate, half = fit_products(products)
    assert rate == pytest.approx(1e12, rel=0.01)
    assert half == 0


def test_what_reads_and_writes_has_the_bandwidth_that_is_left():
    moves = [Timed(OpCost(0, 10, 2_000_000_000, wide=False, is_attention=False), 1.5) for _ in range(3)]
    assert bytes_per_s([*moves, product(64, 9.0)], kernel_s=0.5) == pytest.approx(2e9)


def test_operations_of_a_model_are_counted_as_a_dry_run_counts_them():
    """What of time is known from `timed` is all that a dry run needs: products, attention, and all else; no views."""
    shape = Shape(hidden=64, samples=2, seq=32, vocab=128, layers=1)
    timed = time_models([shape], torch.bfloat16, torch.device("cpu"))
    config = GPTConfig(layers=1, hidden=64, heads=1, seq=32, vocab=128)

    def loss(model):
        words = torch.zeros(2, 32, dtype=torch.long)
        return model(words, words)

    durations = Durations(load_profile("v100-dgx2"))
    rehearsal = Rehearsal(lambda: GPT(config), loss, durations, dtype=torch.bfloat16, in_full=True)
    rehearsal.program.micro_batch()
    assert sum(each.cost.flops for each in timed) == rehearsal.counts().flops
    assert len(attention_of(timed)) == 2
    assert len(products_of(timed)) == 3 * 5  # qkv, out, up, down and the head: forward, and backward of both operands
    assert not any(each.cost.wide for each in (*attention_of(timed), *products_of(timed)))
    assert all(each.seconds > 0 for each in timed)


def test_a_run_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(measure_device, "TINY_RUN", ("--preset", "none-such"))
    with pytest.raises(InputError, match="expected a training to run, it ended with 2: .*none-such"):
        measure_device.measure_reserved_bytes()


@pytest.mark.slow
def test_what_a_tiny_run_takes():
    assert 5e6 < measure_device.measure_reserved_bytes() < 500e6


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
    monkeypatch.setattr(measure_device, "measure_reserved_bytes", lambda: 1 << 26)
    assert cli.main(["doctor", "--measure"]) == 0
    said = capsys.readouterr().out
    profile = load_profile("this")
    assert profile.name == "this machine's CPU"
    assert profile.gpu.reserved_gib == 1 / 16
    assert profile.gpu.is_host
    adam_ns = float(re.search(r"Adam (\S+) ns a parameter", said)[1])
    assert adam_ns == pytest.approx(profile.host.adam_ns_per_param, rel=0.01)  # both are rounded
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
