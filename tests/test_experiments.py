import argparse
import importlib
import json
from pathlib import Path

import pytest
import torch

from experiments import gpu_check
from experiments.registry import MEASUREMENTS
from experiments.torch_timer import DeviceTimer

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def test_every_measurement_can_be_named():
    for name in MEASUREMENTS:
        module = importlib.import_module(f"experiments.{name}")
        assert callable(module.add_arguments)
        assert callable(module.run)


def test_without_a_name_they_are_listed(monkeypatch, capsys):
    main = importlib.import_module("experiments.__main__")
    monkeypatch.setattr("sys.argv", ["experiments"])
    assert main.main() == 0
    lines = capsys.readouterr().out.splitlines()
    for name, measures in MEASUREMENTS.items():
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


def test_a_short_run_over_ranks_keeps_to_its_formulas(tmp_path, monkeypatch, capsys):
    measured = measure_scaling(tmp_path, monkeypatch, capsys, "gloo")
    assert measured["backward, on 2, ms"] > 0
    assert measured["reduce-scatter, on 2, ms"] > 0
    assert 0 <= measured["reduce-scatter inside backward, on 2, %"] <= 100


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"NCCL needs a GPU for each of 2 ranks, this machine has {torch.cuda.device_count()}",
)
def test_a_short_run_over_ranks_on_gpus_keeps_to_its_formulas(tmp_path, monkeypatch, capsys):
    measured = measure_scaling(tmp_path, monkeypatch, capsys, "nccl")
    assert all(measured[f"{stage}, on 2, ms"] > 0 for stage in ("reduce-scatter", "down", "Adam", "up", "all-gather"))


def measure_scaling(tmp_path, monkeypatch, capsys, backend):
    """The results of `scaling_measured` on 1 and 2 ranks; its bytes do not depend on the machine."""
    monkeypatch.setattr("experiments.record.RESULTS", tmp_path)
    module = importlib.import_module("experiments.scaling_measured")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    options = parser.parse_args(["--steps", "1", "--sizes", "1", "2", "--backend", backend])
    assert module.run(options) == 0
    required = [line for line in capsys.readouterr().out.splitlines() if line.startswith("required: ")]
    assert len(required) == 2
    assert all(line.endswith(": met") for line in required)
    (path,) = tmp_path.rglob("*.json")
    record = json.loads(path.read_text())
    assert [len(ranks) for ranks in record["samples"].values()] == [1, 2]
    params, backwards = record["samples"]["1"][0]["num_params"], options.backwards
    for size, ranks in record["samples"].items():
        for rank in ranks:
            own = 2 * params / int(size)  # bytes of its share in 16 bits
            sent = rank["down_bytes"] + rank["up_bytes"] - rank["told_bytes"] - rank["padding_bytes"]
            assert sent == pytest.approx((backwards + 1) * own, rel=0.02)
            assert rank["state_bytes"] == pytest.approx(7 * own, rel=0.02)
    return record["results"]


def test_ranks_without_a_gpu_each_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    module = importlib.import_module("experiments.scaling_measured")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert module.run(parser.parse_args(["--backend", "nccl"])) == 2
    assert "nccl needs 4 GPUs, this machine has 1" in capsys.readouterr().out
