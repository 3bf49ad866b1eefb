"""The README's code runs, and the commands it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.registry import described
from zofftk.cli import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", PYTHON_BLOCKS, ids=range(len(PYTHON_BLOCKS)))
def test_python_blocks_run(code):
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    if "opt" in names:
        assert names["opt"].report().steps == 3
        names["opt"].close()
    if "out" in names:
        assert (names["out"] == 0.8984375).all()


def test_there_are_blocks_to_run():
    assert len(PYTHON_BLOCKS) == 8


def test_make_targets_exist():
    targets = set(re.findall(r"^make (\S+)", README, re.MULTILINE))
    assert targets == {"demo", "test"}
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_commands_exist():
    commands = set(re.findall(r"`zofftk (\w+)", README))
    assert commands == {"train", "doctor", "plan", "dataflow", "bench"}
    help_text = build_parser(bench=False).format_help()
    assert all(command in help_text for command in commands)
    for experiment in re.findall(r"`python -m experiments (\w+)`", README):
        assert experiment in described(), experiment
    for package in re.findall(r"^python -m (\w+)", README, re.MULTILINE):
        assert (ROOT / package / "__main__.py").is_file()


def test_files_it_links_to_exist():
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        file, _, heading = target.partition("#")
        assert (ROOT / file).exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.MULTILINE)
            assert heading in [each.lower().replace(" ", "-") for each in headings], target
