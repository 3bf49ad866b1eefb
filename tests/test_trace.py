"""Spans are counted by kind and written as a Chrome trace."""

from __future__ import annotations

import json

import pytest

import zofftk
from tests.small_gpt import build, loss_of
from zofftk.trace import Trace


def test_totals_go_by_lane_and_kind():
    trace = Trace()
    trace.add("host", "adam: bucket 0", 1.0, 1.5)
    trace.add("host", "adam: bucket 1", 2.0, 2.25)
    trace.add("up", "up: bucket 0", 2.0, 2.25)
    assert trace.total_ms("host", "adam") == 750.0
    assert trace.total_ms("host", "norm") == 0.0
    assert not trace.spans


def test_the_file_is_a_chrome_trace(tmp_path):
    model = build()
    opt = zofftk.OffloadAdamW(model.parameters(), bucket_bytes=16 * 1024, trace=True)
    loss_of(model, 0).backward()
    opt.step()
    opt.write_trace(tmp_path / "timeline.json")
    opt.close()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"compute", "down", "host", "up", "main"} == set(lanes.values())
    spans = [event for event in events if event["ph"] == "X"]
    assert {"pack: bucket 0", "down: bucket 0", "adam: bucket 0", "up: bucket 0", "copy back: bucket 0"} <= {
        span["name"] for span in spans
    }
    assert min(span["ts"] for span in spans) == 0.0
    assert all(span["dur"] >= 0 for span in spans)
    down = next(span for span in spans if span["name"] == "down: bucket 0")
    assert down["args"]["bytes"] > 0


def test_it_must_be_asked_for(tmp_path):
    opt = zofftk.OffloadAdamW(build().parameters())
    with pytest.raises(ValueError, match="trace=True"):
        opt.write_trace(tmp_path / "timeline.json")
    opt.close()
