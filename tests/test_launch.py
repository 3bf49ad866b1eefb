"""`zofftk train` over ranks: the losses of one rank, one checkpoint for any number of them, and one clear end."""

from __future__ import annotations

import json

import pytest

from tests.launched import start

SMALL = ("--seq-len", 16, "--dtype", "fp32")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text("".join(f"def f{i}(x):\n    return x * {i}\n\n" for i in range(200)))
    return path


@pytest.fixture
def run(text, tmp_path):
    """A run of so many ranks to its end; its losses."""

    def run_ranks(size, name, *arguments, steps=20):
        options = () if "--resume" in arguments else (*SMALL, "--batch-size", 4)
        where = ("--data", text, "--out", tmp_path, "--name", name)
        started = start(size, tmp_path / "said", *options, *where, "--steps", steps, *arguments)
        codes = started.wait()
        assert codes == [0] * size, "\n".join(started.says(rank) for rank in range(size))
        assert all(started.says(rank) == "" for rank in range(1, size))
        return [sample["loss"] for sample in json.loads((tmp_path / name / "record.json").read_text())["samples"]]

    return run_ranks


def test_the_losses_are_those_of_one_rank(run):
    one = run(1, "one")
    for size, tp in ((2, 1), (4, 1), (2, 2), (4, 2)):
        assert run(size, f"{size}-{tp}", "--tp", tp) == pytest.approx(one, rel=1e-5), (size, tp)
