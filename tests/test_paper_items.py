"""The tables and figures that `python -m experiments` runs: their list, their records, and going on after a stop."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments import __main__ as command
from experiments import carry_out as carrying
from experiments import record
from experiments.registry import ITEMS, MEASUREMENTS

CHEAP = ["table1", "fig2", "fig4"]
PAPERS = {f"table{number}" for number in range(1, 5)} | {f"fig{number}" for number in range(2, 15)}
KEYS = {"system", "x_name", "x", "value", "unit", "kind"}


@pytest.fixture
def results(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def carry_out(*names, quick=False, fresh=False) -> int:
    return carrying.carry_out(names, quick=quick, fresh=fresh, console=Console(quiet=True))


def pretend(monkeypatch, **runs) -> None:
    """Modules of experiments that do as they are told."""
    modules = {name: SimpleNamespace(add_arguments=lambda parser: None, run=run) for name, run in runs.items()}
    monkeypatch.setattr(carrying.importlib, "import_module", lambda name: modules[name.rpartition(".")[2]])


def kept(name):
    return lambda options: record.keep(name, {}, None, {"rows": []}) and 0


def test_every_table_and_figure_of_the_paper_is_there():
    assert set(ITEMS) > PAPERS
    assert not set(ITEMS) & set(MEASUREMENTS)
    assert not {"list", "run", "all"} & {*ITEMS, *MEASUREMENTS}
    assert sum(item.minutes for item in ITEMS.values()) < 45
    assert sum(item.quick_minutes for item in ITEMS.values()) < 5.5


def test_cheap_items_leave_records_that_can_be_joined(results, capsys):
    assert carry_out(*CHEAP, quick=True) == 0
    for name in CHEAP:
        found = json.loads((results / "quick" / name / f"{name}.json").read_text())
        assert (found["experiment"], found["kind"], found["quick"]) == (name, ITEMS[name].kind, True)
        assert found["made"].endswith("UTC")
        assert all(row.keys() >= KEYS and isinstance(row["x"], str) for row in found["results"]["rows"])
    assert not list(results.glob("*/*.json"))


def test_what_has_a_record_is_not_run_again(results, monkeypatch):
    ran = []
    pretend(monkeypatch, table1=lambda options: ran.append("table1") or kept("table1")(options))
    for _ in range(2):
        assert carry_out("table1") == 0
    assert ran == ["table1"]
    assert carry_out("table1", fresh=True) == 0
    assert carry_out("table1", quick=True) == 0
    assert len(ran) == 3


def test_a_damaged_record_is_made_again(results, monkeypatch):
    pretend(monkeypatch, table1=kept("table1"))
    path = record.item_path("table1", quick=False)
    path.parent.mkdir(parents=True)
    path.write_text('{"experiment": "table1"')
    assert carry_out("table1") == 0
    assert json.loads(path.read_text())["results"] == {"rows": []}


def test_it_goes_on_after_an_interruption(results, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    pretend(monkeypatch, table1=kept("table1"), fig2=interrupted, fig4=kept("fig4"))
    assert carry_out(*CHEAP, fresh=True) == carrying.INTERRUPTED
    assert [name for name in CHEAP if carrying.is_finished(name, quick=False)] == ["table1"]
    pretend(monkeypatch, fig2=kept("fig2"), fig4=kept("fig4"))
    assert carry_out(*CHEAP) == 0


def test_a_failure_does_not_stop_the_others(results, monkeypatch):
    def fails(options):
        raise RuntimeError("no")

    pretend(monkeypatch, table1=fails, fig2=lambda options: 3, fig4=kept("fig4"))
    console = Console(record=True, file=io.StringIO(), width=120)
    assert carrying.carry_out(CHEAP, quick=False, fresh=False, console=console) == 1
    said = console.export_text()
    assert "table1: failed: RuntimeError: no" in said
    assert "fig2: failed: RuntimeError: it ended with 3 and left no record" in said
    assert "without a record: table1, fig2" in said


def test_quick_and_fresh_reach_those_that_know_them(results, monkeypatch):
    seen = {}

    def run(options):
        seen.update(vars(options))
        return kept("fig12")(options)

    def add_arguments(parser):
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--fresh", action="store_true")

    module = SimpleNamespace(add_arguments=add_arguments, run=run)
    monkeypatch.setattr(carrying.importlib, "import_module", lambda name: module)
    carry_out("fig12", quick=True, fresh=True)
    assert seen == {"quick": True, "fresh": True}


@pytest.mark.parametrize("arguments", [["run", "fig99"], ["run"], ["fig99"], ["all", "--often"]])
def test_what_there_is_not_is_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["experiments", *arguments])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "error:" in capsys.readouterr().err


def test_no_records_of_long_runs_is_one_line(results, monkeypatch, capsys):
    monkeypatch.setattr("experiments.curves.kept.RESULTS", results)
    monkeypatch.setattr("sys.argv", ["experiments", "fig12"])
    assert command.main() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "python -m experiments convergence_gpt" in said


def test_the_list_says_how_each_is_obtained(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["experiments", "list"])
    assert command.main() == 0
    lines = capsys.readouterr().out.splitlines()
    for name, item in ITEMS.items():
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert f"({item.kind})" in line


def test_schedules_are_examined():
    from experiments.fig6 import examine

    step = {"start_ms": 0.0, "stop_ms": 10.0}
    late = {"start_ms": 10.0, "stop_ms": 20.0}

    def span(stage, start_ms, stop_ms):
        return {"stage": stage, "start_ms": start_ms, "stop_ms": stop_ms}

    spans = [span("forward", 10.0, 13.0), span("backward", 13.0, 18.0), span("update", 10.0, 15.0)]
    spans += [span("values up", 15.0, 19.0), span("copy back", 16.0, 19.0)]
    assert all(examine(spans, step, late).values())
    assert not all(examine([*spans, span("values up", 5.0, 6.0)], step, late).values())


@pytest.mark.parametrize("name", ITEMS)
def test_items_can_be_run_directly(name):
    command.build_parser(name).parse_args([name])


def test_what_is_run_with_options_of_its_own_is_kept_apart(results, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["experiments", "fig3", "--micro-batch", "1"])
    assert command.main() == 0
    assert not record.item_path("fig3", quick=False).exists()
    assert list((results / "partial" / "fig3").glob("*.json"))
    monkeypatch.setattr("sys.argv", ["experiments", "table1", "--quick"])
    assert command.main() == 0
    assert record.item_path("table1", quick=True).exists()


@pytest.mark.parametrize(
    "written",
    ["[1, 2]", '{"experiment": "table1", "results": null}', '{"experiment": "table1", "quick": true, "results": {}}'],
)
def test_a_record_that_is_none_of_this_setting_is_made_anew(results, written):
    path = record.item_path("table1", quick=False)
    path.parent.mkdir(parents=True)
    path.write_text(written)
    assert not carrying.is_finished("table1", quick=False)
    path.write_bytes(b"\xff\xfe")
    assert not carrying.is_finished("table1", quick=False)


@pytest.mark.parametrize("config", [{"missing": 2}, {"calibration": {"gpu.max_efficiency": 0.9}}])
def test_a_record_without_all_runs_or_of_another_calibration_is_made_anew(results, config):
    path = record.item_path("fig12", quick=False)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"experiment": "fig12", "quick": False, "config": config, "results": {}}))
    assert not carrying.is_finished("fig12", quick=False)
    path.write_text(json.dumps({"experiment": "fig12", "quick": False, "config": {"missing": 0}, "results": {}}))
    assert carrying.is_finished("fig12", quick=False)


@pytest.mark.parametrize(("name", "option"), [("table4", "--repeats"), ("throughput_small", "--repeats")])
def test_counts_are_at_least_1(monkeypatch, capsys, name, option):
    monkeypatch.setattr("sys.argv", ["experiments", name, option, "0"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "expected a whole number of 1 or more, got 0" in capsys.readouterr().err
