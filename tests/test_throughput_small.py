"""The emulated V100 keeps the proportions of the real one, and what is measured on it has something to stand beside."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import zofftk
from experiments import small_machine, throughput_small
from experiments.profiled_device import ProfiledDevice
from experiments.small_chain import Chain
from experiments.small_machine import BLOCKS, GPU_ADAM_BYTES, SLOWER, SmallModel, slowed
from experiments.throughput_cases import AT_STEP, INSIDE, NONE, SLOW, SYNC, SYSTEMS, Case, all_cases
from experiments.throughput_small import Prepared, predict
from tests.compare import assert_same_bits
from zofftk.device.base import Work
from zofftk.device.emulated import EmulatedDevice
from zofftk.device.virtual import VirtualDevice
from zofftk.presets import PRESETS
from zofftk.profile import load_profile
from zofftk.virtual.durations import Durations

pytestmark = pytest.mark.usefixtures("no_threads_left")

MS = 1_000_000
V100 = load_profile("v100-dgx2")
FEWER = 3072.0


def small(**times: int) -> SmallModel:
    """4 + 8 ms a block unless told otherwise."""
    return SmallModel(
        fewer=FEWER,
        embedding_numel=1024,
        block_numel=32 * 1024,
        embedding_ns=(0, 0),
        block_ns=(times.get("forward_ns", 4 * MS), times.get("backward_ns", 8 * MS)),
        head_ns=0,
        tflop=1.0,
    )


def prepared(system: str, model: SmallModel | None = None, micro_batches: int = 1) -> Prepared:
    model = model or small()
    slow = slowed(V100, model.scale, adam_ns_per_param=SYSTEMS[system].adam_ns_per_param)
    return Prepared(Case("fig14", system, "1b", 1, micro_batches), model, Durations(slow))


def test_the_slow_machine_keeps_the_proportions_of_the_machine():
    """What takes so many times as long as the link does there, does so here."""
    scale = SLOWER / FEWER
    large, slow = Durations(V100), Durations(slowed(V100, scale))
    numel = int(1e6 * FEWER)
    work = update_of(numel), update_of(numel / FEWER)
    pairs = {
        "link down": (large.copy_ns("down", 2 * numel, 1), slow.copy_ns("down", round(2 * numel / FEWER), 1)),
        "link up": (large.copy_ns("up", 2 * numel, 1), slow.copy_ns("up", round(2 * numel / FEWER), 1)),
        "update": (large.host_ns(work[0]), slow.host_ns(work[1])),
        "device memory": (large.move_ns(numel), slow.move_ns(round(numel / FEWER))),
        "16-bit compute": (
            large.compute_ns(numel, 0, 0, wide=False),
            slow.compute_ns(round(numel / FEWER), 0, 0, wide=False),
        ),
        "32-bit compute": (
            large.compute_ns(numel, 0, 0, wide=True),
            slow.compute_ns(round(numel / FEWER), 0, 0, wide=True),
        ),
    }
    for name, (there, here) in pairs.items():
        assert here == pytest.approx(there * scale, rel=1e-3), name


def update_of(numel: float) -> Work:
    return Work(round(numel), 0)


def test_the_small_model_computes_as_long_for_each_parameter():
    model = small_machine.small_model(PRESETS["1b"].model, 1, V100)
    assert model.numel * model.fewer == pytest.approx(PRESETS["1b"].model.num_params, rel=1e-3)
    compute_s = model.compute_ns / 1e9 / model.scale
    assert 15 < model.tflop / compute_s < 125 * 0.55  # TFLOPS, below what the profile's device reaches at most


def test_a_synchronous_step_is_predicted_at_its_bound():
    """Compute, the last bucket down, the update, the last one up; all else is hidden, but for packs and latencies."""
    each = prepared(SYNC)
    model, durations = each.model, each.durations
    bucket_ns = durations.copy_ns("up", 2 * model.block_numel, 1)
    update_ns = BLOCKS * durations.host_ns(update_of(model.block_numel))
    tail_ns = durations.copy_ns("down", 2 * model.embedding_numel, 1)  # what is behind the last block
    bound_ns = model.compute_ns + bucket_ns + tail_ns + update_ns + bucket_ns
    assert bound_ns <= predict(each) * 1e9 <= 1.02 * bound_ns


def test_the_systems_differ_by_what_they_hide():
    seconds = {system: predict(prepared(system)) for system in SYSTEMS}
    model = small()
    compute_s, adam_s = model.compute_ns / 1e9, 0.26e-9 * SLOWER * model.numel
    on_device_s = GPU_ADAM_BYTES * model.numel / (900 * 0.8e9 / SLOWER)
    assert seconds[NONE] == pytest.approx(compute_s + on_device_s, rel=1e-3)
    assert seconds[SLOW] - seconds[SYNC] == pytest.approx(adam_s * (1.43 / 0.26 - 1), rel=0.02)
    assert seconds[INSIDE] < seconds[AT_STEP] < seconds[SYNC] < seconds[SLOW]
    assert seconds[SYNC] - seconds[INSIDE] > 0.9 * adam_s


def test_micro_batches_are_computed_one_after_the_other():
    one, three = (predict(prepared(NONE, micro_batches=number)) for number in (1, 3))
    adds_s = 2 * 6 * small().numel / (900 * 0.8e9 / SLOWER)
    assert three - one == pytest.approx(2 * small().compute_ns / 1e9 + adds_s, rel=1e-3)


@pytest.mark.parametrize("system", [SYNC, AT_STEP, INSIDE])
def test_an_emulated_step_is_not_faster_than_its_durations_and_trains(system):
    """Slower it may be, by as much as the machine is busy: that is measured, not tested."""
    each = prepared(system, small(forward_ns=MS, backward_ns=2 * MS))
    policy: dict[str, Any] = SYSTEMS[system].options or {}
    steps = 4
    device = ProfiledDevice(each.durations)
    with ExitStack() as stack:
        chain = Chain(each.model, device)
        opt = zofftk.OffloadAdamW(
            chain.parameters(),
            lr=0.1,
            bucket_bytes=2 * each.model.block_numel,
            device=device,
            **policy,
        )
        stack.callback(opt.close)
        began = time.perf_counter()
        train(chain, opt, steps)
        device.finish()
        assert time.perf_counter() - began > steps * each.model.compute_ns / 1e9
    plain = Chain(each.model, VirtualDevice(each.durations))
    opt = zofftk.OffloadAdamW(plain.parameters(), lr=0.1, device=EmulatedDevice(), **policy)
    train(plain, opt, steps)
    opt.close()
    for param, expected in zip(chain.parameters(), plain.parameters(), strict=True):
        assert param.abs().max() > 0
        assert_same_bits(param, expected)


def train(chain, opt, steps):
    for _ in range(steps):
        chain.micro_batch()
        opt.step()
        opt.zero_grad()


def test_what_was_enqueued_in_a_row_has_no_gaps():
    """A sleep that ends late does not delay what follows it on the same stream."""
    device = ProfiledDevice(Durations(V100))
    began = time.perf_counter()
    for _ in range(200):
        device.compute("forward", MS // 10)
    assert time.perf_counter() - began < 0.02  # the caller runs ahead
    device.finish()
    assert time.perf_counter() - began > 0.02
    line = device._lines["compute"]
    device.close()
    assert line._end_ns / 1e9 - began < 0.02 + 0.02  # the line began with the first, and has 20 ms in it


def test_all_figures_have_their_systems():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    by_batch = {(case.system, case.micro_batch) for case in cases if case.figure == "fig14"}
    offloaded = [system for system in SYSTEMS if system != NONE]
    assert by_batch == {(system, batch) for system in offloaded for batch in (1, 2, 4, 6, 8, 16, 32)} | {
        (NONE, batch) for batch in (1, 2, 4, 6, 8)
    }
    assert {case.preset for case in cases if case.figure == "fig9"} == {"2b", "6b", "8b", "10b"}
    assert {case.micro_batches * case.micro_batch for case in cases if case.figure == "fig8"} <= {30, 32}


def test_a_short_run_keeps_a_measured_and_a_simulated_row_of_each(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("experiments.record.RESULTS", tmp_path)
    monkeypatch.setattr(throughput_small, "small_model", lambda config, batch, profile: small())
    parser = argparse.ArgumentParser()
    throughput_small.add_arguments(parser)
    before = torch.get_num_threads()
    missed = throughput_small.run(parser.parse_args(["--quick", "--repeats", "1"]))
    assert torch.get_num_threads() == before
    assert missed == ("missed: noise" in capsys.readouterr().out)  # the figure itself needs a quiet machine
    (path,) = tmp_path.rglob("*.json")
    record = json.loads(path.read_text())
    rows = record["results"]["rows"]
    assert {(row["system"], row["kind"]) for row in rows} == {
        (system, kind) for system in SYSTEMS for kind in ("measured", "simulated")
    }
    for row in rows:
        assert row.keys() == {"figure", "system", "x_name", "x", "value", "unit", "kind"}
        assert (row["figure"], row["x_name"], row["x"], row["unit"]) == ("fig14", "batch", 1, "TFLOPS/GPU")
    for sample in record["samples"]:
        assert sample["measured_s"]
        assert sample["predicted_tflops"] == pytest.approx(1.0 * SLOWER / FEWER / sample["predicted_s"])
