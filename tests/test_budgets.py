"""Sizes that keep every file one idea."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = sorted(
    p for folder in ("zofftk", "triton_kernels", "experiments", "paper_figures") for p in ROOT.glob(f"{folder}/**/*.py")
)
CPP = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".inl"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize("path", [*PYTHON, *CPP], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            start = first.end_lineno if ast.get_docstring(node) else node.lineno - 1
            assert node.end_lineno - start <= MAX_FUNCTION_LINES, node.name
