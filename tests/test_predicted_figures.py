"""Figures 8 to 14, predicted: their bars are the paper's, their scores count what they say, their fit finds numbers."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import json
import math
from pathlib import Path

import pytest

from zofftk.baselines import workload
from zofftk.baselines.prediction import predict
from zofftk.baselines.zero_offload_2020 import ZeroOffload2020
from zofftk.gpt_config import GPTConfig
from zofftk.profile import load_profile
from zofftk.virtual.durations import Durations
from zofftk.virtual.events import Spent

ROOT = Path(__file__).parent.parent
V100 = load_profile("v100-dgx2")
SMALL = GPTConfig(layers=8, hidden=256, heads=4, vocab=1024, seq=64, recompute=True)
FIGURES = ("fig8", "fig9", "fig10", "fig11", "fig14")


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture
def all_fits(monkeypatch):
    """Every micro-batch fits, so that no bytes need to be predicted."""
    for figure in ("fig8", "fig10", "fig11"):
        monkeypatch.setattr(f"experiments.{figure}.largest", lambda *args: max(args[-1]))
    monkeypatch.setattr("experiments.fig14.fits", lambda *args: True)


def named(name):
    return importlib.import_module(f"experiments.{name}")


def row(system, value, paper, figure="fig8", x="1B", used=False):
    return {
        "figure": figure,
        "system": system,
        "x_name": "params",
        "x": x,
        "value": value,
        "paper": paper,
        "used_in_calibration": used,
    }


# -- recordings that are timed afterwards --------------------------------------------------------------------------


def test_a_recording_is_timed_on_any_machine():
    quick = dataclasses.replace(V100, gpu=dataclasses.replace(V100.gpu, kernel_us=0.0))
    slow = dataclasses.replace(quick, gpu=dataclasses.replace(quick.gpu, max_efficiency=0.275, memory_gb_s=450.0))
    one, other = (workload.record_workload(SMALL, 1, 1, profile) for profile in (quick, slow))
    times = [
        sum(e.ns for events in each.parts.values() for e in events if isinstance(e, Spent)) for each in (one, other)
    ]
    assert times[1] == pytest.approx(2 * times[0], rel=1e-3)
    again = workload._record_few(dataclasses.replace(SMALL, layers=6), 1, 1)
    assert again[1].timed(again[0], Durations(quick)) == one.few


@pytest.mark.parametrize("slices", [1, 2])
def test_two_recordings_say_what_a_third_would_have(slices):
    few = dataclasses.replace(SMALL, layers=6)
    at = Durations(V100, 1, slices)
    made, tape, _ = workload._few(few, 7, slices)
    recorded, its_tape, _ = workload._record_few(few, 7, slices)
    assert tape.timed(made, at) == its_tape.timed(recorded, at)


def test_only_time_takes_as_long():
    for system, options in (("ddp", {}), ("zero-offload-2020", {"delayed": True}), ("swapadvisor", {}), ("l2l", {})):
        whole, quick = (
            predict(system, SMALL, V100, micro_batches=3, only_time=only_time, **options) for only_time in (False, True)
        )
        assert whole.step == quick.step
        assert "activations" in whole.device_bytes or "activations" not in quick.device_bytes


# -- corrected schedules -------------------------------------------------------------------------------------------


def test_sums_of_gradients_take_turns_on_the_links(monkeypatch):
    """A bucket is one rank's: with more ranks, each moves less, and all wait as long."""
    monkeypatch.setattr(ZeroOffload2020, "bucket_numel", 100_000)  # much less than a shard
    slow = dataclasses.replace(V100, link=dataclasses.replace(V100.link, up_gb_s=0.05, latency_us=0.0))
    at = [predict("zero-offload-2020", SMALL, slow, ranks=ranks, micro_batches=4) for ranks in (1, 4)]
    assert at[1].link_bytes[1] == pytest.approx(at[0].link_bytes[1] / 4, rel=0.01)
    sums_ns = 3 * 2 * SMALL.num_params / slow.link.up_gb_s
    for predicted in at:
        model_ns = 4 * sum(
            e.ns
            for _, events in workload.record_workload(SMALL, 1, 1, slow).events()
            for e in events
            if isinstance(e, Spent)
        )
        assert predicted.step.ns > model_ns + sums_ns


def test_the_gradients_that_pytorch_had_twice():
    held = predict("ddp", SMALL, V100).device_bytes
    assert held["copy of the gradients in buckets"] == 2 * SMALL.num_params


# -- bars ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", FIGURES)
def test_bars_are_those_that_the_paper_has(figure, all_fits):
    with (ROOT / "paper_figures" / "reference" / "paper.csv").open() as file:
        printed = {(r["system"], r["x_name"], r["x"]) for r in csv.DictReader(file) if r["item"] == figure}
    bars = named(figure).bars({"fig9": 1, "fig11": 1, "fig14": 4})
    paper = [(bar.system, bar.x_name, bar.x) for bar in bars if not bar.ours]
    assert sorted(paper) == sorted(printed)
    assert any(bar.ours for bar in bars)
    assert all(bar.figure == figure for bar in bars)


def test_figures_8_and_10_train_with_512_samples(all_fits):
    for figure, gpus in (("fig8", 1), ("fig10", 16)):
        for bar in named(figure).bars({}):
            for step in bar.steps:
                assert step.ranks * step.slices == gpus
                samples = step.ranks * step.micro_batch * step.micro_batches
                assert samples == pytest.approx(512, rel=0.01), bar.key


def test_the_largest_that_fits(monkeypatch):
    found = named("bars.micro_batches")
    monkeypatch.setattr(found, "fits", lambda system, size, ranks, slices, micro_batch: micro_batch <= 10)
    assert found.largest("ddp", 1, 1, 1, found.halves(32)) == 8
    assert found.largest("ddp", 1, 1, 1, [11, 12]) is None
    assert found.halves(10) == [10, 5, 2, 1]
    assert found.tiles(32) == [1, 2, 4, 8, 16, 24, 32]
    assert found.tiles(10) == [1, 2, 4, 8, 10]
    assert found.tiles(4) == [1, 2, 4]
    assert found.tiles(1) == [1]


def test_a_bar_shows_its_fastest_step(monkeypatch):
    bar = named("bars.bar")
    steps = tuple(bar.Step("megatron", 1, 1, slices, 1, 1) for slices in (1, 2))
    reached = {1: 10.0, 2: 30.0}
    monkeypatch.setattr(bar.Step, "tflops", lambda step, profile: reached[step.slices])
    assert bar.Bar("fig10", "Megatron", "params", "1B", lambda: steps).predict(V100) == (30.0, steps[1])
    assert bar.Bar("fig10", "Megatron", "params", "1B", tuple).predict(V100) == ("OOM", None)


def test_a_figure_keeps_rows_that_join_the_papers(monkeypatch, tmp_path, all_fits, capsys):
    fig9, bar = named("fig9"), named("bars.bar")
    monkeypatch.setattr(named("record"), "RESULTS", tmp_path)
    monkeypatch.setattr(bar.Step, "tflops", lambda step, profile: 26.9)
    assert fig9.run(argparse.Namespace(paper_only=True, quick=False)) == 0
    (path,) = tmp_path.rglob("*.json")
    kept = json.loads(path.read_text())
    first = kept["results"]["rows"][0]
    expected = {"system": "without DPU", "x_name": "params", "x": "2B", "value": 26.9, "unit": "TFLOPS/GPU"}
    assert first.items() >= (expected | {"kind": "simulated", "used_in_calibration": False}).items()
    assert {"assumptions", "profile", "calibration", "micro_batches"} <= kept["config"].keys()
    assert "+0.0%" in capsys.readouterr().out


def test_quick_keeps_the_first_places_of_the_papers_systems(all_fits):
    chosen = named("bars.command")._chosen(
        named("fig14").bars({"fig14": 4}), argparse.Namespace(quick=True, paper_only=False)
    )
    assert {bar.system: [each.x for each in chosen if each.system == bar.system] for bar in chosen} == {
        system: ["1", "2"] for system in named("fig14").SYSTEMS if not system.startswith("zofftk")
    }


# -- the calibration -----------------------------------------------------------------------------------------------


def test_free_numbers_are_few_and_named():
    free = named("calibration.free_numbers")
    assert len(free.FREE_NUMBERS) <= 8
    assert len({number.name for number in free.FREE_NUMBERS}) == len(free.FREE_NUMBERS)
    paper = named("paper_values").paper_values
    for figure, system, x in free.ITEMS:
        assert isinstance(paper(figure)[system, x], float)
    kept = named("calibration.calibrated").load()
    for number in free.FREE_NUMBERS:
        assert number.lowest <= kept.values[number.name] <= number.highest, number.name


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    calibrated = named("calibration.calibrated")
    written = calibrated.start().but({"gpu.work_exponent": 0.1234, "micro_batches.fig14": 5})
    calibrated.save(written, tmp_path / "kept.toml")
    kept = calibrated.load(tmp_path / "kept.toml")
    assert dict(kept.values) == dict(written.values)
    assert kept.profile.gpu.work_exponent == 0.1234
    assert kept.profile.gpu.half_intensity == 0
    assert kept.counts == {"fig9": 1, "fig11": 1, "fig14": 5}
    (tmp_path / "kept.toml").write_text("[values]\n")
    with pytest.raises(ValueError, match="expected the values"):
        calibrated.load(tmp_path / "kept.toml")


def test_kept_values_are_described_without_a_fit(monkeypatch, tmp_path, capsys):
    command, free = named("calibration.command"), named("calibration.free_numbers")
    monkeypatch.setattr(named("record"), "RESULTS", tmp_path)
    monkeypatch.setattr(command, "errors_of", lambda: lambda calibration: [0.0] * len(free.ITEMS))
    monkeypatch.delattr(command, "fit")
    assert command.run(argparse.Namespace(kept=True, quick=False, no_left_out=True)) == 0
    (path,) = tmp_path.rglob("*.json")
    numbers = json.loads(path.read_text())["results"]["numbers"]
    assert [each["name"] for each in numbers] == [number.name for number in free.FREE_NUMBERS]
    assert numbers[0].keys() == {"name", "meaning", "unit", "start", "value", "fitted on"}


def test_a_fit_finds_the_numbers_that_made_the_items():
    calibrated, fit = named("calibration.calibrated"), named("calibration.fit")
    truth = calibrated.start().but(
        {
            "gpu.max_efficiency": 0.5,
            "gpu.work_exponent": 0.2,
            "interconnect.inside_gb_s": 40.0,
            "micro_batches.fig14": 3,
        }
    )

    def times(calibration):
        gpu, count = calibration.profile.gpu, calibration.counts["fig14"]
        inside = calibration.profile.interconnect.inside_gb_s
        for work in (1e9, 1e11, 1e12):
            yield 1 / (gpu.max_efficiency * (work / 1e12) ** gpu.work_exponent)
        yield 100 / inside + 1 / gpu.max_efficiency
        yield 1 + 1 / count

    aims = [math.log(each) for each in times(truth)]
    found = fit.fit(calibrated.start(), lambda at: [math.log(a) - b for a, b in zip(times(at), aims, strict=True)])
    assert found.counts["fig14"] == 3
    assert found.values["gpu.max_efficiency"] == pytest.approx(0.5, rel=0.03)
    assert found.values["gpu.work_exponent"] == pytest.approx(0.2, rel=0.03)
    assert found.values["interconnect.inside_gb_s"] == pytest.approx(40, rel=0.15)
    untouched = calibrated.start().values["interconnect.between_gb_s"]
    assert found.values["interconnect.between_gb_s"] == pytest.approx(untouched, rel=0.01)


def test_a_step_on_one_gpu_is_not_predicted_again_for_another_interconnect():
    items, bar = named("calibration.items"), named("bars.bar")
    changed = dataclasses.replace(
        V100, interconnect=dataclasses.replace(V100.interconnect, inside_gb_s=1.0, between_gb_s=1.0)
    )
    for ranks, same in ((1, {"inside_gb_s", "between_gb_s"}), (16, {"between_gb_s"}), (32, set())):
        step = bar.Step("zero2", 1, ranks, 1, 1, 1)
        at = items._of_concern(step, changed).interconnect
        assert {name for name in ("inside_gb_s", "between_gb_s") if getattr(at, name) != 1.0} == same


# -- scores --------------------------------------------------------------------------------------------------------


def test_errors_leave_out_what_was_fitted():
    scores = named("scores")
    rows = [row("a", 11.0, 10.0), row("b", 13.0, 10.0, used=True), row("c", "OOM", 10.0), row("d", 8.0, 10.0, "fig9")]
    found = scores.median_errors(rows)
    assert found["fig8"] == {"median_percent": pytest.approx(10.0), "bars": 1}
    assert found["all"] == {"median_percent": pytest.approx(15.0), "bars": 2}


def test_orders_count_where_the_printed_gap_does():
    scores = named("scores")
    rows = [row("a", 20.0, 30.0), row("b", 25.0, 29.0), row("c", 22.0, 20.0), row("d", 99.0, 1.0, x="2B")]
    found = scores.orders(rows)
    assert found["right"] == 1  # b above c; a and b are within 5 %
    assert [(each["higher"]["system"], each["lower"]["system"]) for each in found["wrong"]] == [("a", "c")]


def test_what_does_not_fit_is_right_only_where_the_paper_says_so():
    scores = named("scores")
    rows = [row("a", "OOM", "OOM"), row("b", "OOM", 3.0), row("c", 3.0, "OOM"), row("d", 3.0, 3.0)]
    found = scores.outs_of_memory(rows)
    assert (found["printed"], [each["system"] for each in found["wrong"]]) == (2, ["b", "c"])


@pytest.mark.parametrize(
    ("zero2", "between"),
    [((30, 35, 40), [32, 64]), ((30, 31, 40), [64, 128]), ((36, 37, 40), None), ((30, 35, 30), None)],
)
def test_the_crossover_is_where_the_lead_changes_once(zero2, between):
    scores = named("scores")
    rows = [row("ZeRO-2", "OOM", "OOM", "fig11", "16"), row("ZeRO-Offload", 31.0, 31.0, "fig11", "16")]
    for gpus, value in zip((32, 64, 128), zero2, strict=True):
        rows += [row("ZeRO-2", value, 30.0, "fig11", str(gpus)), row("ZeRO-Offload", 33.0, 34.0, "fig11", str(gpus))]
    assert scores.crossover(rows)["between"] == between


def test_the_report_says_what_is_met():
    scores = named("scores")
    rows = [row("a", 20.0, 20.5), row("b", 25.0, 30.0), row("c", 3.0, "OOM")]
    results = {
        "errors": scores.median_errors(rows),
        "orders": scores.orders(rows),
        "oom": scores.outs_of_memory(rows),
        "crossover": scores.crossover(rows),
    }
    text = "\n".join(scores.report(results))
    assert "of 2 bars: met" in text
    assert "1 of 1 right: met" in text
    assert "1 bars wrong: missed" in text
    assert "fig8 at 1B: c 3.0, paper OOM" in text
