"""Figures and report: from records alone, beside the paper's values, the same bytes each time."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from paper_figures.__main__ import main
from paper_figures.bars import draw_panels
from paper_figures.claims import CLAIMS, judge_all
from paper_figures.frames import errors_of, joined, label_of, paper_frame
from paper_figures.items import ITEMS
from paper_figures.records import MissingRecordError, Records, load_record

ROOT = Path(__file__).parent.parent


def row(system, x_name, x, value, unit, kind="simulated", **more):
    return {"system": system, "x_name": x_name, "x": x, "value": value, "unit": unit, "kind": kind} | more


def record_of(item, rows, **results):
    return {
        "experiment": item,
        "kind": "simulated",
        "made": "2026-01-02 03:04 UTC",
        "hardware": {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**34, "gpus": []},
        "versions": {"torch": "2.13"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "results": {"rows": rows, **results},
    }


SPANS = [
    {"lane": "compute", "stage": "forward", "label": "forward", "start_ms": 1.0, "stop_ms": 3.0, "nbytes": 0},
    {"lane": "down", "stage": "gradients down", "label": "down: bucket 0", "start_ms": 3, "stop_ms": 4, "nbytes": 9},
]
CURVES = [
    {"model": "1.3m", "update": update, "seeds": 3, "smoothed_over": 2, "step": [1, 2, 3], "loss": [3.0, 2.0, 1.0]}
    for update in ("synchronous", "delayed after 40")
]
DIFFERENCE = {"model": "1.3m", "update": "delayed after 40", "measure": "held-out loss", "seeds": 3, "mean": 0.01}


def records() -> dict[str, dict]:
    """One of each kind of drawing."""
    fig9 = [
        row("without DPU", "params", "2B", 26.0, "TFLOPS/GPU", used_in_calibration=True),
        row("with DPU", "params", "2B", 31.2, "TFLOPS/GPU"),
    ]
    fig10 = [row("ZeRO-2", "params", "10B", "OOM", "TFLOPS/GPU"), row("ZeRO-2", "params", "8B", 30.0, "TFLOPS/GPU")]
    fig11 = [row("ZeRO-Offload", "gpus", gpus, 33.0, "TFLOPS/GPU") for gpus in (1, 128)]
    fig11.append(row("ZeRO-2", "gpus", 1, "OOM", "TFLOPS/GPU"))
    curves = {"curves": CURVES, "equal": [], "report": ["| a | b |", "| --- | --- |"]}
    difference = DIFFERENCE | {"seed_sd": 0.02, "in_seed_sds": 0.5}
    rates = [
        row(f"AdamW, {update}", "lr", lr, value, "nats", optimizer="AdamW", update=update, sd=0.02)
        for update, values in (("synchronous", (4.5, 4.2)), ("delayed after 40", (4.5, "diverged")))
        for lr, value in zip(("0.001", "0.01"), values, strict=True)
    ]
    small = [
        row(system, "params", "2B", value, "TFLOPS", kind=kind, figure="fig9")
        for kind in ("measured", "simulated")
        for system, value in (
            ("offload", 26.0),
            ("offload, delayed, inside backward", 30.0),
            ("offload, delayed, at step", 27.0),
        )
    ]
    late = {"optimizer": "AdamW", "update": "delayed after 40", "seeds": 3}
    differences = [late | {"lr": 0.001, "mean": 0.0, "in_seed_sds": 0.1}, late | {"lr": 0.01, "mean": None}]
    differences[1]["in_seed_sds"] = None
    numbers = [{"name": "efficiency", "meaning": "of the peak", "unit": "", "value": 0.5, "fitted_on": "Figure 8"}]
    return {
        "fig3": record_of("fig3", [], spans=SPANS, steps=[{"step": 2, "start_ms": 1.0}], checks={"down late": False}),
        "fig9": record_of("fig9", fig9),
        "fig10": record_of("fig10", fig10),
        "fig11": record_of("fig11", fig11),
        "fig12": record_of("fig12", [], differences=[difference], **curves),
        "calibration": record_of("calibration", [], numbers=numbers),
        "throughput_small": record_of("throughput_small", small),
        "delay_rates": record_of("delay_rates", rates, differences=differences),
    }


def write(folder: Path, of: dict[str, dict]) -> Path:
    for item, record in of.items():
        (folder / item).mkdir(parents=True, exist_ok=True)
        (folder / item / f"{item}.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[Path, Path]:
    """The folders of two drawings of the same records."""
    results = write(tmp_path_factory.mktemp("results"), records())
    out = [tmp_path_factory.mktemp("out") for _ in range(2)]
    for folder in out:
        assert main(["--results", str(results), "--out", str(folder)]) == 0
    return out[0], out[1]


def test_rows_stand_beside_the_papers():
    both = joined("fig9", records()["fig9"])
    (first,) = both[(both["system"] == "without DPU") & (both["x"] == "2B")].itertuples()
    assert (first.paper, first.ours, first.error) == ("26.9", 26.0, pytest.approx(26 / 26.9 - 1))
    assert len(both) == len(paper_frame("fig9"))
    assert both[both["x"] == "10B"]["ours"].isna().all()
    extra = record_of("fig9", [row("zofftk", "params", "2B", 40.0, "TFLOPS/GPU")])
    assert list(joined("fig9", extra)["system"])[-1] == "zofftk"


def test_what_else_a_row_says_is_left_alone():
    more = record_of(
        "fig9", [row("with DPU", "params", "2B", 31.2, "TFLOPS/GPU", ours=False, paper=31.2, figure="fig9")]
    )
    assert joined("fig9", more)["error"].dropna().tolist() == [0.0]


def test_numbers_on_an_axis_are_one_place():
    for x in (1, 1.0, "1"):
        found = joined("fig11", record_of("fig11", [row("ZeRO-Offload", "gpus", x, 35.0, "TFLOPS/GPU")]))
        assert found["error"].dropna().tolist() == [0.0]


def test_another_unit_is_an_error():
    with pytest.raises(ValueError, match="expected 'TFLOPS/GPU' for with DPU at 2B, the record has 'GFLOPS'"):
        joined("fig9", record_of("fig9", [row("with DPU", "params", "2B", 1.0, "GFLOPS")]))


def test_errors_leave_out_what_was_fitted():
    found = errors_of("fig9", records()["fig9"])
    assert (found["compared"], found["unfitted"], found["median_unfitted"]) == (2, 1, 0.0)
    assert found["worst_at"] == "without DPU at 2B"
    out_of_memory = errors_of("fig10", records()["fig10"])
    assert (out_of_memory["ooms"], out_of_memory["ooms_agreeing"]) == (1, 1)


def test_every_file_has_the_same_bytes_again(drawn):
    first, second = drawn
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    drawings = [path for path in files if path.parts[0] == "drawn"]
    assert {path.suffix for path in drawings} == {".png", ".svg", ".pdf", ".csv"}
    assert len(drawings) == 4 * len(records())
    for path in files:
        assert (first / path).read_bytes() == (second / path).read_bytes(), path


def test_the_report_has_everything(drawn):
    text = (drawn[0] / "README.md").read_text()
    for item, each in ITEMS.items():
        assert f"### {each.heading}" in text
        if item in records():
            assert f"](drawn/{item}.png)" in text
        else:
            assert f"Not drawn: no record yet: python -m experiments run {item}" in text
    assert all(claim.text in text for claim in CLAIMS)
    for says in ("a CPU, 2 cores, 16 GiB", "torch 2.13", "0123456789", "- **no**: down late", "Median", "0.0%"):
        assert says.lower() in text.lower(), says
    page = (drawn[0] / "report.html").read_text()
    assert '<img src="drawn/fig9.svg"' in page
    assert "<table>" in page


def test_data_are_written_beside(drawn):
    values = pd.read_csv(drawn[0] / "drawn" / "fig9.csv")
    assert values["error"].notna().sum() == 2
    assert list(pd.read_csv(drawn[0] / "drawn" / "fig12.csv")["loss"]) == [3.0, 2.0, 1.0] * 2


def verdict_of(tmp_path, text, of) -> str:
    verdicts = judge_all(Records(write(tmp_path, of)))
    (found,) = [each for each in verdicts if each.claim.text.startswith(text)]
    return found.verdict


def test_a_verdict_follows_its_record(tmp_path):
    of = records()
    late = "The delayed update ends at the same loss"
    assert verdict_of(tmp_path, late, of) == "holds"
    of = copy.deepcopy(of)
    of["fig12"]["results"]["differences"][0]["in_seed_sds"] = 7.0
    assert verdict_of(tmp_path, late, of) == "holds in part"
    of["delay_rates"]["results"]["differences"][0] |= {"in_seed_sds": 7.0, "mean": 0.5}
    assert verdict_of(tmp_path, late, of) == "not reproduced"
    fast = "The delayed update makes"
    assert verdict_of(tmp_path, fast, of) == "holds in part"
    of["throughput_small"]["results"]["rows"][1]["value"] = 20.0
    assert verdict_of(tmp_path, fast, of) == "not reproduced"
    assert verdict_of(tmp_path, "CPU-Adam is over 5x", of) == "no record yet"


def test_a_missing_record_names_its_command(tmp_path, capsys):
    with pytest.raises(MissingRecordError, match="no record yet: python -m experiments run fig7"):
        load_record("fig7", tmp_path)
    assert main(["fig7", "--results", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "fig7: no record yet: python -m experiments run fig7\n"


def test_a_record_of_another_form_is_one_line(tmp_path, capsys):
    write(tmp_path, {"fig9": record_of("fig9", [{"system": "with DPU"}])})
    assert main(["fig9", "--results", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "fig9: its record cannot be read: KeyError" in capsys.readouterr().err


def test_an_unknown_item_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fig99"])
    assert "got fig99" in capsys.readouterr().err


def test_figures_know_records_alone():
    code = "import sys, paper_figures.__main__; print([name for name in sys.modules if name[:5] in ('zofft', 'torch')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_system_looks_the_same_in_all_panels_and_in_the_legend():
    def values(*systems):
        columns = {"system": systems, "x_name": "batch", "x": "1", "ours": 1.0, "paper": 1.0, "error": 0.0}
        return pd.DataFrame(columns | {"used_in_calibration": False})

    panels = {"one": values("unheard", "of"), "other": values("of", "unheard")}
    figure = draw_panels(panels, title="", y_label="", mark="")
    drawn = [[bar.get_facecolor() for bar in axes.patches] for axes in figure.axes]
    legend = [handle.get_facecolor() for handle in figure.legends[0].legend_handles[:2]]
    assert drawn[0] == drawn[1][::-1] == legend
    assert legend[0] != legend[1]


def test_users_mistakes_are_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--results", str(tmp_path / "nowhere")])
    assert "--results: expected a folder of records, got" in capsys.readouterr().err
    results = write(tmp_path / "results", {"fig9": records()["fig9"]})
    (tmp_path / "file").write_text("")
    assert main(["fig9", "--results", str(results), "--out", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'file'}")
    (results / "fig9" / "fig9.json").write_text('{"results": null}')
    assert main(["fig9", "--results", str(results), "--out", str(tmp_path / "out")]) == 1
    assert "no record yet" in capsys.readouterr().err


def test_one_item_leaves_the_report_alone(tmp_path):
    results = write(tmp_path / "results", {"fig9": records()["fig9"]})
    assert main(["fig9", "--results", str(results), "--out", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_report_of_quick_records_says_so(tmp_path, drawn):
    quick = records()["fig9"] | {"quick": True}
    assert main(["--results", str(write(tmp_path / "results", {"fig9": quick})), "--out", str(tmp_path / "out")]) == 0
    assert "quick settings" in (tmp_path / "out" / "README.md").read_text()
    assert "quick settings" not in (drawn[0] / "README.md").read_text()


def test_what_was_not_run_is_not_said_to_fit():
    both = joined("fig11", record_of("fig11", [row("ZeRO-Offload", "gpus", 1, 35.0, "TFLOPS/GPU")]))
    (no_room,) = both[(both["system"] == "ZeRO-2") & (both["x"] == "1")].to_dict("records")
    assert label_of(no_room, no_room["error"]) == ""
