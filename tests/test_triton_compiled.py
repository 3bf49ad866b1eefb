"""The machine code of every kernel for every supported GPU, made and read without one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from zofftk.triton_kernels import kernels  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter is on: nothing is compiled", allow_module_level=True)

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CAPABILITIES = [70, 75, 80, 89, 90, 100, 120]
DTYPES = ["float32", "bfloat16", "float16"]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
POINTERS = {
    "addresses_ptr": "*i64",
    "range_of_program_ptr": "*i32",
    "ranges_ptr": "*i64",
    "sums_ptr": "*fp64",
    "flag_ptr": "*i32",
}
INTEGERS = {"flat": "i64", "numel": "i64"}
WITH_STATS = {"SUMS": True, "FLAG": True}
WITHOUT_STATS = {"SUMS": False, "FLAG": False, "sums_ptr": None, "flag_ptr": None}

EVERYWHERE = [
    ("pack_kernel", {"SOURCE": "bfloat16", "TARGET": "bfloat16"} | WITH_STATS),
    ("pack_kernel", {"SOURCE": "float32", "TARGET": "bfloat16"} | WITH_STATS),
    ("copy_back_kernel", {"SOURCE": "bfloat16", "TARGET": "bfloat16"}),
    ("grad_stats_kernel", {"DTYPE": "bfloat16", "FLAG": True}),
]
OTHERS = [
    *[("pack_kernel", {"SOURCE": s, "TARGET": t} | WITH_STATS) for s in DTYPES for t in DTYPES],
    ("pack_kernel", {"SOURCE": "float32", "TARGET": "bfloat16"} | WITHOUT_STATS),
    *[("copy_back_kernel", {"SOURCE": s, "TARGET": t}) for s in DTYPES for t in DTYPES],
    *[("grad_stats_kernel", {"DTYPE": d, "FLAG": True}) for d in DTYPES],
]
CASES = [
    *[(capability, *variant) for capability in CAPABILITIES for variant in EVERYWHERE],
    *[
        pytest.param(capability, *variant, marks=pytest.mark.slow)
        for capability in (80, 90, 120)
        for variant in OTHERS
        if variant not in EVERYWHERE
    ],
]


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


def compile_for(capability: int, kernel: str, constants: dict):
    """As a launch from torch would: tables on 16 bytes, everything else as it comes."""
    function = getattr(kernels, kernel)
    types = {n: "constexpr" if n in constants else (POINTERS | INTEGERS)[n] for n in function.arg_names}
    aligned = ("addresses_ptr", "range_of_program_ptr", "ranges_ptr")
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names) if n in aligned}
    source = ASTSource(function, types, constants, hints)
    options = {"num_warps": kernels.NUM_WARPS, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def read(cubin: Path) -> tuple[int, str]:
    """Resources used, then machine code; newer dumpers print an error in place of code for GPUs before 75."""
    command = [CUOBJDUMP, "--dump-resource-usage", "--dump-sass", cubin]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stdout


def count(sass: str, instruction: str) -> int:
    return len(re.findall(rf"\b{re.escape(instruction)}\s", sass))


@pytest.mark.parametrize(("capability", "kernel", "constants"), CASES, ids=str)
def test_machine_code(capability, kernel, constants, tmp_path):
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_for(capability, kernel, constants).asm["cubin"])
    code, text = read(cubin)
    assert re.search(r"\bSTACK:0\b.*\bLOCAL:0\b", text), text
    if capability < 75:
        return
    assert code == 0
    assert count(text, "EXIT"), "machine code is shown"
    assert not re.search(r"\b(LDL|STL)\b", text), "spills"
    if capability < 80:
        return
    source = constants.get("SOURCE") or constants["DTYPE"]
    lanes = kernels.BLOCK_NUMEL // (32 * kernels.NUM_WARPS)  # elements of a block a thread moves
    assert count(text, "LDG.E.128") == lanes * ITEMSIZE[source] // 16
    stores = 0 if kernel == "grad_stats_kernel" else lanes * ITEMSIZE[constants["TARGET"]] // 16
    assert count(text, "STG.E.128") == stores
