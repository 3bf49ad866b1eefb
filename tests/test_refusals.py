"""The table of refusals is true: each line raises what it says, and nothing has changed."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch

import zofftk
from tests.compare import assert_same_bits

PAGE = Path(__file__).parents[1] / "docs" / "refusals.md"
ROW = re.compile(r"^\| (fresh|gathered|used) \| `(.+?)` \| `(\w+)` \| (.*?) ?\|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text())

pytestmark = pytest.mark.usefixtures("no_threads_left")


def test_every_line_of_the_tables_is_read():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(("| fresh", "| gathered", "| used"))]
    assert len(ROWS) == len(lines) > 30


@pytest.mark.parametrize(("when", "what", "error", "because"), ROWS, ids=[row[1][:60] for row in ROWS])
def test_refusal(when, what, error, because):
    model = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)
    opt = zofftk.OffloadAdamW(model.named_parameters())
    if when != "fresh":
        model(x).sum().backward()
    if when == "used":
        opt.step()
    names = {"model": model, "w": model.weight, "x": x, "opt": opt, "torch": torch, "zofftk": zofftk}
    names |= {"OffloadAdamW": zofftk.OffloadAdamW, "copy": copy, "pickle": pickle}
    states = [opt.state[p][name] for p in opt.state for name in ("master", "exp_avg", "exp_avg_sq", "step")]
    before = [state.clone() for state in states]
    with pytest.raises(Exception, match=re.escape(because)) as caught:
        exec(what, names)
    assert error in [cls.__name__ for cls in type(caught.value).__mro__]
    for state, old in zip(states, before, strict=True):
        assert_same_bits(state, old)
    for each in (names.get("o"), opt):
        if each is not None:
            each.close()
