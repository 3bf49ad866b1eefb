"""Runs that are killed at any moment: a whole checkpoint is always there, and from it the run ends with the same bits.

`programs.kills` does it; its processes are forks of one that has the imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def kills(count: int, seed: int, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "error", "-m", "tests.programs.kills", str(count), str(seed), *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_kind_of_run_killed_once_and_faults_that_kills_show():
    outcomes = kills(7, 0, "with faults")
    assert [outcome["error"] for outcome in outcomes[:7]] == [None] * 7
    assert len({outcome["run"] for outcome in outcomes[:7]}) == 7
    in_place, forgotten = outcomes[7:]
    assert in_place["fault"] == "files are written in place"
    assert "is truncated, damaged or not one" in in_place["error"]
    assert forgotten["fault"] == "what is late is not saved"
    assert forgotten["error"] == "the run ends otherwise than without the kill"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_kills(seed):
    outcomes = kills(56, seed)
    assert len(outcomes) == 56
    assert [outcome for outcome in outcomes if outcome["error"]] == []
    assert any(outcome["in_save"] for outcome in outcomes)
