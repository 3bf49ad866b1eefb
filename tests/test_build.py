"""Installing: no CUDA tools are needed, and a missing compiler or header is one clear statement."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEP = """
import torch
from zofftk.cpu_adam import adamw_step
p = torch.ones(33)
adamw_step(p, torch.zeros(33), torch.zeros(33), torch.ones(33), step=1, lr=.1, weight_decay=0.0)
assert ((p - .9).abs() < 1e-6).all(), p
"""


def build(tmp_path, **variables):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(tmp_path / "out"),
        str(ROOT),
    ]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("case", ["a_no_ninja_or_nvcc", "b_wrong_nvcc"])
def test_b01_stepping_needs_no_build_tools(tmp_path, case):
    env = dict(os.environ)
    if case == "b_wrong_nvcc":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\necho 'release 10.0, V10.0.1'\n")
        (tmp_path / "bin" / "nvcc").chmod(0o755)
        env["CUDA_HOME"] = str(tmp_path)
    else:
        env["PATH"] = str(tmp_path)
    result = subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_b01_no_compiler(tmp_path):
    result = build(tmp_path, CXX="/bin/false")
    assert result.returncode != 0
    assert "zofftk needs a C++17 compiler" in result.stdout + result.stderr


@pytest.mark.slow
def test_b01_no_python_headers(tmp_path):
    result = build(tmp_path, SKBUILD_CMAKE_ARGS=f"-DPython_INCLUDE_DIR={tmp_path};-DPYTHON_INCLUDE_DIR={tmp_path}")
    assert result.returncode != 0
    assert "zofftk needs Python's C headers" in result.stdout + result.stderr
