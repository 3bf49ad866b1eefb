"""Figure 7: where the paper's sizes are reached, the printed one fits and the next one up does not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from zofftk.baselines.ladder import ladder
from zofftk.baselines.prediction import predict
from zofftk.profile import load_profile

V100 = load_profile("v100-dgx2")
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.parametrize(
    ("system", "ranks", "slices", "printed", "above", "where"),
    [
        ("ddp", 1, 1, 1.4, 2, "device"),
        ("ddp", 16, 1, 1.4, 2, "device"),
        ("megatron", 1, 1, 1.4, 2, "device"),
        ("megatron", 2, 8, 15, 17, "device"),
        ("zero2", 1, 1, 1.4, 2, "device"),
        ("zero2", 16, 1, 8, 10, "device"),
        ("zero-offload-2020", 1, 1, 13, 15, "device"),
        ("zero-offload-2020", 2, 8, 70, 80, "host"),
    ],
)
def test_sizes_that_are_the_papers(system, ranks, slices, printed, above, where):
    fits, lacks = (predict(system, ladder()[size], V100, ranks=ranks, slices=slices) for size in (printed, above))
    assert fits.fits
    assert (lacks.device_lacks > 0, lacks.host_lacks > 0) == (where == "device", where == "host")


def test_sixteen_ranks_share_their_host():
    predicted = predict("zero-offload-2020", ladder()[70], V100, ranks=2, slices=8)
    of_all = 16 * sum(predicted.host_bytes.values())
    assert predicted.host_lacks == of_all - round(V100.host.memory_gib * 2**30)
    assert of_all == pytest.approx(18 * ladder()[70].num_params + 16 * 2 * 4 * 2**30, rel=0.01)


def test_the_experiment_shows_bytes_where_it_differs(tmp_path, monkeypatch, capsys):
    from experiments import fig7

    monkeypatch.setattr("experiments.record.RESULTS", tmp_path)
    monkeypatch.setattr(fig7, "ladder", lambda: {size: ladder()[size] for size in (1.4, 2.0)})
    parser = argparse.ArgumentParser()
    fig7.add_arguments(parser)
    assert fig7.run(parser.parse_args(["--systems", "ddp", "l2l", "--gpus", "1"])) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 sizes are the paper's" in printed
    assert "differs: at 2 B" in printed
    (path,) = tmp_path.rglob("*.json")
    rows = json.loads(path.read_text())["results"]["rows"]
    assert [(row["largest"], row["printed"]) for row in rows] == [(1.4, 1.4), (2.0, 17.0)]
    assert rows[0]["lacks"] > 0


def test_the_page_runs(capsys):
    page = (ROOT / "docs" / "baselines.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/baselines.md", "exec"), {})
    assert "fits: True" in capsys.readouterr().out


def test_our_own_engine_runs_on_slices():
    whole, cut = (predict("zofftk", ladder()[1.4], V100, slices=slices) for slices in (1, 2))
    assert sum(cut.host_bytes.values()) == pytest.approx(sum(whole.host_bytes.values()) / 2, rel=0.05)
