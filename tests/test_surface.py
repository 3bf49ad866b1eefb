"""What users may rely on: public names, environment variables, and a light import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import zofftk

ROOT = Path(__file__).parent.parent


def test_the_public_names_are_these():
    optimizers = ["OffloadAdam", "OffloadAdamW", "OffloadLion", "OffloadSGD"]
    files = ["gather_full", "load", "load_sharded", "save", "save_sharded"]
    assert sorted(zofftk.__all__) == sorted(
        [*optimizers, *files, "CPUAdamW", "LossScale", "OffloadConfig", "cpu_adam", "cpu_lion", "cpu_sgd", "offload"]
    )
    for name in zofftk.__all__:
        assert getattr(zofftk, name).__doc__


def test_the_environment_variables_are_these():
    sources = [*ROOT.glob("zofftk/**/*.py"), *ROOT.glob("csrc/*"), *ROOT.glob("triton_kernels/*.py")]
    reads = re.compile(r"""(?:getenv\(|environ(?:\.get)?[\[(])\s*["'](\w+)""")
    found = {name for path in sources if path.is_file() for name in reads.findall(path.read_text())}
    assert {name for name in found if name.startswith("ZOFFTK_")} == {"ZOFFTK_ISA"}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_the_import_is_light():
    code = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import zofftk
print(time.perf_counter() - start)
loaded = set(sys.modules) - before
zofftk.OffloadAdamW
print(sorted(set(sys.modules) & {"cupy", "triton", "matplotlib", "rich", "sentencepiece"}))
"""
    seconds, heavy = run(code).splitlines()
    assert float(seconds) < 0.5
    assert heavy == "[]"


def test_the_kernels_of_triton_kernels_need_no_extension():
    code = """
import sys
sys.modules["zofftk._cpu_adam"] = None
from zofftk.triton_kernels import reference
import torch
flat = torch.zeros(3)
reference.pack([(torch.ones(3), 0, 3, 0)], flat)
print(flat.tolist(), "zofftk._cpu_adam" in sys.modules and sys.modules["zofftk._cpu_adam"])
"""
    assert run(code).strip() == "[1.0, 1.0, 1.0] None"
