"""The public front of the kernels: what it refuses, where it runs, what it imports; and the twins' interpreted run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.compare import assert_same_bits
from zofftk import triton_kernels
from zofftk.triton_kernels import (
    BLOCK_NUMEL,
    CopyBackPlan,
    PackPlan,
    Range,
    Span,
    copy_back,
    grad_stats,
    launch,
    pack,
    reference,
)

ROOT = Path(__file__).parent.parent
TWINS = "tests/test_triton_twins.py"
COMPILED = "tests/test_triton_compiled.py"
OLDEST = "3.6.0"


def run_tests(*args: str, **variables: str) -> str:
    """pytest in a process of its own: the interpreter must be asked for before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "not gpu", *args]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " skipped" not in result.stdout.replace(GPU_SKIPS, ""), result.stdout
    return result.stdout


GPU_SKIPS = ", 2 skipped"  # the two cases of a GPU's size


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_equal_their_twins_in_the_interpreter():
    assert GPU_SKIPS in run_tests(TWINS, TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_oldest_supported_triton(tmp_path):
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path, f"triton=={OLDEST}"]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if installed.returncode != 0:
        pytest.skip(f"Triton {OLDEST} cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    code = "import triton; print(triton.__version__, triton.__file__)"
    seen = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert seen.stdout.split() == [OLDEST, str(tmp_path / "triton" / "__init__.py")]
    run_tests(TWINS, TRITON_INTERPRET="1", PYTHONPATH=path)
    run_tests(COMPILED, PYTHONPATH=path)


def test_the_public_names_are_these():
    assert triton_kernels.__all__ == [
        "BLOCK_NUMEL",
        "CopyBackPlan",
        "PackPlan",
        "Range",
        "Span",
        "copy_back",
        "count_blocks",
        "grad_stats",
        "pack",
    ]
    for name in ("pack", "copy_back", "grad_stats"):
        assert getattr(triton_kernels, name).__doc__
        twin, kernel = getattr(reference, name), getattr(triton_kernels, name)
        assert twin.__annotations__ == kernel.__annotations__


def test_blocks_are_those_of_the_layout():
    from zofftk import layout

    assert BLOCK_NUMEL == layout.BLOCK_NUMEL


def test_the_import_and_cpu_tensors_need_no_triton_and_no_extension():
    code = """
import sys
import torch
sys.modules["zofftk._cpu_adam"] = sys.modules["triton"] = None
from zofftk.triton_kernels import CopyBackPlan, Range, Span, grad_stats, launch, pack
flat, sums, flag = torch.zeros(3), torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
pack([Range(torch.ones(3), 0, 3, 0)], flat, sums, flag)
CopyBackPlan([Span(0, 3, 0)], [torch.float32], "cpu")(flat * 2, [back := torch.zeros(3)])
grad_stats(back, sums, flag)
print(back.tolist(), sums.tolist(), flag.tolist())
print(sorted(name for name in sys.modules if name.startswith("zofftk")))
try:
    launch.load_kernels()
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    values, modules, message = result.stdout.splitlines()
    assert values == "[2.0, 2.0, 2.0] [12.0] [0]"
    assert all(name in ("zofftk", "zofftk._cpu_adam") or "triton_kernels" in name for name in eval(modules))
    assert message.startswith("the kernels for GPU tensors need Triton, which cannot be imported here: pip install")


def sums(numel=4, dtype=torch.float64):
    return torch.zeros(numel, dtype=dtype)


FLAT = torch.zeros(8)
ONES = torch.ones(4)
REFUSED = {
    "flat 2-D": (ValueError, r"flat: expected a 1-D", lambda f: f([Range(ONES, 0, 4, 0)], torch.zeros(2, 4))),
    "flat strided": (ValueError, r"strides \(2,\)", lambda f: f([Range(ONES, 0, 4, 0)], torch.zeros(16)[::2])),
    "flat short": (ValueError, "at least 9 elements, got 8", lambda f: f([Range(ONES, 0, 4, 5)], FLAT)),
    "tensor short": (
        ValueError,
        "range 1: .* 5 .*, got 4",
        lambda f: f([Range(ONES, 0, 1, 0), Range(ONES, 0, 5, 1)], FLAT),
    ),
    "backwards": (ValueError, "start 3, stop 2", lambda f: f([Range(ONES, 3, 2, 0)], FLAT)),
    "negative": (ValueError, "0 or more, got -1 and 0", lambda f: f([Range(ONES, 0, 1, -1)], FLAT)),
    "not a tensor": (TypeError, "range 0: .*got list", lambda f: f([Range([1.0], 0, 1, 0)], FLAT)),
    "None": (TypeError, "range 0: .*got NoneType", lambda f: f([Range(None, 0, 3, 0)], FLAT)),
    "no range": (TypeError, "range 1: expected a Range, got int", lambda f: f([Range(ONES, 0, 4, 0), 3], FLAT)),
    "flat is None": (TypeError, "flat: .*got NoneType", lambda f: f([Range(ONES, 0, 4, 0)], None)),
    "start in words": (TypeError, "range 0: expected integers, .*'0'", lambda f: f([Range(ONES, "0", 4, 0)], FLAT)),
    "half an offset": (TypeError, "integers, .*offset=0.5", lambda f: f([Range(ONES, 0, 4, 0.5)], FLAT)),
    "block a float": (TypeError, "integers, .*block=1.0", lambda f: f([Range(ONES, 0, 4, 0, 1.0)], FLAT)),
    "int tensor": (TypeError, "range 0: .*floating .*int64", lambda f: f([Range(ONES.long(), 0, 4, 0)], FLAT)),
    "complex tensor": (TypeError, "range 0: .*complex64", lambda f: f([Range(ONES + 0j, 0, 4, 0)], FLAT)),
    "int flat": (TypeError, "flat: .*floating .*int32", lambda f: f([Range(ONES, 0, 4, 0)], FLAT.int())),
    "other device": (
        ValueError,
        "tensor on cpu as flat, got one on meta",
        lambda f: f([Range(ONES.to("meta"), 0, 4, 0)], FLAT),
    ),
    "sums dtype": (TypeError, "square_sums: .*float64, got .*float32", lambda f: f([], FLAT, sums(1, torch.float32))),
    "sums short": (ValueError, "at least 3 elements, got 1", lambda f: f([Range(ONES, 0, 4, 0, 2)], FLAT, sums(1))),
    "flag dtype": (
        TypeError,
        "flag: .*int32, got .*bool",
        lambda f: f([], FLAT, sums(), torch.zeros(1, dtype=torch.bool)),
    ),
    "flag alone": (ValueError, "square_sums beside it", lambda f: f([], FLAT, None, torch.zeros(1, dtype=torch.int32))),
}

INVERSES = {pack: copy_back, reference.pack: reference.copy_back}
NEEDS_SUMS = {case for case in REFUSED if case.startswith(("sums", "flag"))}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_in_the_same_words(case):
    error, words, call = REFUSED[case]
    for function in (pack, reference.pack):
        with pytest.raises(error, match=words):
            call(function)
        if case not in NEEDS_SUMS:
            with pytest.raises(error, match=words):
                call(lambda ranges, flat, f=INVERSES[function]: f(flat, ranges))
    assert not FLAT.any()
    assert torch.equal(ONES, torch.ones(4))


@pytest.mark.parametrize("function", [grad_stats, reference.grad_stats])
def test_statistics_of_what_has_none_are_refused(function):
    with pytest.raises(TypeError, match="flat: expected a torch.Tensor, got NoneType"):
        function(None, sums())
    with pytest.raises(TypeError, match="flat: expected a floating dtype, got torch.int32"):
        function(FLAT.int(), sums())
    function(FLAT.double(), sums())  # on the CPU any floating dtype will do


def test_shared_places_are_refused():
    with pytest.raises(ValueError, match="share no element of flat, got two at 3"):
        PackPlan([Span(0, 4, 0), Span(0, 4, 3)], [torch.float32] * 2, "cpu")
    plan = PackPlan([Span(0, 4, 0), Span(0, 4, 4)], [torch.float32] * 2, "cpu")
    plan([ONES, ONES], torch.zeros(8))
    with pytest.raises(ValueError, match="share no sum, got two at 0"):
        plan([ONES, ONES], torch.zeros(8), sums())
    CopyBackPlan([Span(0, 4, 0), Span(0, 4, 0)], [torch.float32] * 2, "cpu")


def test_a_plan_refuses_what_it_was_not_made_for():
    plan = CopyBackPlan([Span(0, 4, 0)], [torch.bfloat16], "cpu")
    with pytest.raises(TypeError, match="range 0: expected dtype torch.bfloat16, got torch.float32"):
        plan(FLAT, [ONES])
    with pytest.raises(ValueError, match="expected 1 tensors, one for each span, got 2"):
        plan(FLAT, [ONES, ONES])
    with pytest.raises(ValueError, match="a dtype for each of 1 spans, got 0"):
        PackPlan([Span(0, 4, 0)], [], "cpu")
    with pytest.raises(TypeError, match="range 0: expected integers, got Span.*stop='4'"):
        PackPlan([Span(0, "4", 0)], [torch.float32], "cpu")
    with pytest.raises(TypeError, match="range 0: expected a floating dtype, got torch.int8"):
        PackPlan([Span(0, 4, 0)], [torch.int8], "cpu")
    with pytest.raises(ValueError, match="expected tensors on cpu or cuda, got meta"):
        grad_stats(torch.zeros(3, device="meta"), sums())


def test_a_write_in_the_middle_of_a_backward_is_caught():
    weight = torch.ones(8, requires_grad=True)
    hidden = (torch.ones(8, requires_grad=True) * weight).sin()
    hidden.register_hook(lambda grad: copy_back(torch.zeros(8), [Range(weight, 0, 8, 0)]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


def test_pack_and_copy_back_are_inverse_on_the_cpu():
    tensors = [torch.randn(3, 5).t(), torch.randn(0), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    spans, offset = [], 1
    for tensor in tensors:
        spans.append(Span(0, tensor.numel(), offset, len(spans)))
        offset += tensor.numel() + 2
    flat, copies = torch.zeros(offset), [torch.zeros_like(tensor) for tensor in tensors]
    dtypes = [torch.float32] * 3
    PackPlan(spans, dtypes, "cpu")(tensors, flat, out := sums())
    CopyBackPlan(spans, dtypes, "cpu")(flat, copies)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert_same_bits(copy, tensor)
    assert out.sum().item() == pytest.approx(sum(t.double().square().sum().item() for t in tensors))


def test_integers_of_any_kind_will_do():
    start, stop, offset = np.int64(1), torch.tensor(3), np.uint8(2)
    pack([Range(ONES, start, stop, offset)], flat := torch.zeros(5))
    assert flat.tolist() == [0, 0, 1, 1, 0]


def test_tables_of_more_than_two_to_the_31_elements():
    numel = 2**31 + 17
    spans = [Span(0, 100, 0, 0), Span(0, numel, 128, 1), Span(5, 5, 0, 0), Span(4096, numel, 2**32, 2**20)]
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]
    tables = launch.Tables(spans, dtypes, torch.device("cpu"))
    assert [(group.dtype, group.num_programs) for group in tables.groups] == [
        (torch.float32, 1),
        (torch.bfloat16, 2 * 2**19 + 1),
    ]
    programs = tables.groups[1].range_of_program
    assert programs[[0, 2**19, 2**19 + 1, -1]].tolist() == [1, 1, 3, 3]
    assert tables.rows.tolist() == [
        [0, 100, 0, 0, 0],
        [0, numel, 128, 0, 1],
        [0, 0, 0, 0, 0],
        [4096, numel, 2**32, 2**19 + 1, 2**20 - 2**19 - 1],
    ]
