import argparse
import importlib
import json
from pathlib import Path

import pytest
import torch

from experiments import gpu_check
from experiments.torch_timer import DeviceTimer

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def test_every_experiment_can_be_named():
    main = importlib.import_module("experiments.__main__")
    for name in main.EXPERIMENTS:
        module = importlib.import_module(f"experiments.{name}")
        assert callable(module.add_arguments)
        assert callable(module.run)


def test_without_a_name_they_are_listed(monkeypatch, capsys):
    main = importlib.import_module("experiments.__main__")
    monkeypatch.setattr("sys.argv", ["experiments"])
    assert main.main() == 0
    lines = capsys.readouterr().out.splitlines()
    for name, measures in main.EXPERIMENTS.items():
        assert f"  {name:20}{measures}" in lines
    assert "Run one with `python -m experiments NAME`" in lines[-1]


@pytest.mark.parametrize(("ratio", "says"), [(1.0, "1.10: met"), (1.2, "1.10: missed: noise on a busy machine can")])
def test_they_say_whether_what_is_required_was_met(ratio, says, capsys):
    step_time = importlib.import_module("experiments.step_time")
    step_time.show(step_time.compare({"torch": [[10.0]], "zofftk": [[10.0 * ratio]]}))
    assert f"required: a ratio of at most {says}" in capsys.readouterr().out


def test_step_time_compares_medians_and_keeps_the_spread():
    step_time = importlib.import_module("experiments.step_time")
    results = step_time.compare({"torch": [[10, 10, 90], [20, 20, 20]], "zofftk": [[11, 11, 11], [18, 18, 99]]})
    assert results["torch_median_ms"] == 20
    assert results["zofftk_median_ms"] == 14.5
    assert results["ratio"] == pytest.approx(14.5 / 20)
    assert (results["ratio_lowest_turn"], results["ratio_highest_turn"]) == pytest.approx((0.9, 1.1))


def test_host_memory_charges_the_engine_its_worst_run():
    host_memory = importlib.import_module("experiments.host_memory")
    engine = [{"peak_bytes": peak, "num_params": 10, "staging_bytes": 60} for peak in (1180, 1200)]
    results = host_memory.compare({"zofftk": engine, "dropped": [{"peak_bytes": 1000}, {"peak_bytes": 1010}]})
    assert results["added_bytes"] == 200
    assert results["needed_bytes"] == 200
    assert results["added_over_needed"] == 1.0


def test_a_record_keeps_samples_and_results(monkeypatch, tmp_path):
    record = importlib.import_module("experiments.record")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    path = record.keep("step_time", {"preset": "tiny"}, [1, 2], {"ratio": 1.0})
    assert path.parent == tmp_path / "step_time"
    kept = json.loads(path.read_text())
    assert (kept["experiment"], kept["samples"], kept["results"]) == ("step_time", [1, 2], {"ratio": 1.0})
    assert {"command", "git", "versions", "hardware"} <= kept.keys()


def test_gpu_check_measures_on_any_device():
    """On the CPU its ratios mean nothing, but everything it calls is called."""
    device = torch.device("cpu")
    timer = DeviceTimer(device, repeats=1)
    results = gpu_check.measure_kernels(device, timer, 512) | gpu_check.measure_copies(device, timer, 512)
    assert set(gpu_check.REQUIRED) <= set(results)
    assert all(value > 0 for value in results.values())


@pytest.mark.parametrize("name", ["overlap", "delayed", "hook_overhead"])
def test_short_runs_leave_a_record(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("experiments.record.RESULTS", tmp_path)
    module = importlib.import_module(f"experiments.{name}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    quick = ["--unit-ms", "4", "--repeats", "1"]
    short = {"overlap": quick, "delayed": quick, "hook_overhead": ["--params", "20", "--repeats", "2"]}
    missed = module.run(parser.parse_args(short[name]))
    assert missed in (0, 1)  # the figure itself needs a quiet machine
    required = [line for line in capsys.readouterr().out.splitlines() if line.startswith("required: ")]
    assert required
    assert missed == any(": missed: noise" in line for line in required)
    assert all(line.endswith(": met") or ": missed" in line for line in required)
    (path,) = tmp_path.rglob("*.json")
    assert json.loads(path.read_text())["samples"]
