"""Every instruction set gives the bits of the scalar reference: all sizes, offsets, dtypes, threads and chunks."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compare import assert_same_bits
from tests.kernel import DTYPES, kernel_step, wild
from zofftk import _cpu_adam

VECTOR_ISAS = [isa for isa in _cpu_adam.available_isas() if isa != "scalar"]
SIZES = [*range(68), 127, 128, 129, 255, 256, 257, 1023, 1024, 1025]


@pytest.fixture
def chunk():
    yield _cpu_adam._set_chunk
    _cpu_adam._set_chunk(0)


def run(isa, n, grad_dtype, out_dtype, offset=0, seed=0, threads=1, **options):
    """A step on slices that start `offset` elements into their buffers, with guard elements on both sides."""
    total = n + offset + 9
    tensors = [wild(total, seed), wild(total, seed + 1), wild(total, seed + 2).abs(), wild(total, seed + 3)]
    tensors[3] = tensors[3].to(grad_dtype)
    if out_dtype is not None:
        tensors.append(torch.full((total,), 7.0, dtype=out_dtype))
    before = [tensor.clone() for tensor in tensors]
    p, m, v, g, *out = (tensor[offset : offset + n] for tensor in tensors)
    kernel_step(p, m, v, g, *out, threads=threads, isa=isa, **options)
    for tensor, old in zip(tensors, before, strict=True):
        assert_same_bits(tensor[:offset], old[:offset], "guard before")
        assert_same_bits(tensor[offset + n :], old[offset + n :], "guard after")
    assert_same_bits(tensors[3], before[3], "gradient")
    return [tensor[offset : offset + n] for tensor in tensors]


def assert_equal_runs(got, expected, what):
    for name, a, b in zip(("p", "m", "v", "g", "out"), got, expected, strict=False):
        assert_same_bits(a, b, f"{what} {name}")


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("out_dtype", [None, *DTYPES.values()], ids=str)
@pytest.mark.parametrize("grad_dtype", list(DTYPES.values()), ids=str)
def test_sizes_and_dtypes(isa, grad_dtype, out_dtype):
    for n, decoupled in itertools.product(SIZES, (True, False)):
        options = dict(step=n + 1, weight_decay=0.1, decoupled=decoupled, grad_scale=0.37, offset=n % 5, seed=n)
        what = f"n={n} decoupled={decoupled}"
        assert_equal_runs(run(isa, n, grad_dtype, out_dtype, **options),
                          run("scalar", n, grad_dtype, out_dtype, **options), what)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 700), offset=st.integers(0, 17), seed=st.integers(0, 2**20), step=st.integers(1, 2**40),
    lr=st.floats(0, 10), beta1=st.floats(0, 0.9999), beta2=st.floats(0, 0.99999), eps=st.floats(0, 1e-2),
    weight_decay=st.floats(0, 1), decoupled=st.booleans(), grad_scale=st.sampled_from([1.0, -1.0, 2.0**-16, 3e-3, 0.0]),
    grad=st.sampled_from(list(DTYPES.values())), out=st.sampled_from([None, *DTYPES.values()]),
)  # fmt: skip
def test_any_step(n, offset, seed, step, lr, beta1, beta2, eps, weight_decay, decoupled, grad_scale, grad, out):
    options = dict(offset=offset, seed=seed, step=step, lr=lr, betas=(beta1, beta2), eps=eps)
    options |= dict(weight_decay=weight_decay, decoupled=decoupled, grad_scale=grad_scale)
    expected = run("scalar", n, grad, out, **options)
    for isa in VECTOR_ISAS:
        assert_equal_runs(run(isa, n, grad, out, **options), expected, isa)


@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_threads_and_chunks_change_nothing(isa, chunk):
    expected = run(isa, 5003, torch.bfloat16, torch.bfloat16)
    for elements, threads in itertools.product((64, 192, 4096), (1, 2, 3, 7)):
        chunk(elements)
        got = run(isa, 5003, torch.bfloat16, torch.bfloat16, threads=threads)
        assert_equal_runs(got, expected, f"chunk={elements} threads={threads}")


@pytest.mark.parametrize("isa", _cpu_adam.available_isas())
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_out_may_be_grad(isa, dtype):
    p, m, v, g = wild(1037, 1), wild(1037, 2), wild(1037, 3).abs(), wild(1037, 4).to(dtype)
    apart = [p.clone(), m.clone(), v.clone(), torch.empty_like(g)]
    kernel_step(*apart[:3], g, apart[3], isa=isa)
    kernel_step(p, m, v, g, g, isa=isa)
    assert_equal_runs([p, m, v, g], apart, isa)


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_helpers(isa, dtype):
    """Sums of squares, accumulation and conversion."""
    name = str(dtype).removeprefix("torch.")
    for n in SIZES:
        x = wild(n + 1, n).to(dtype)[1:]
        sums, runs, converted = [], [], []
        for each in (isa, "scalar"):
            sums.append(torch.full((n // 64 + 1,), 5.0, dtype=torch.float64))
            _cpu_adam.block_square_sums(x.data_ptr(), name, n, 64, sums[-1].data_ptr(), 2, each)
            runs.append(wild(n, 9))
            _cpu_adam.accumulate(runs[-1].data_ptr(), x.data_ptr(), name, n, 2, each)
            wide, back = torch.empty(n), torch.empty(n, dtype=dtype)
            _cpu_adam.convert(wide.data_ptr(), "float32", x.data_ptr(), name, n, 2, each)
            values = wild(n, 11)
            _cpu_adam.convert(back.data_ptr(), name, values.data_ptr(), "float32", n, 2, each)
            converted.append((wide, back))
            assert_same_bits(wide, x.float(), f"{each} widen n={n}")
            assert_same_bits(back, values.to(dtype), f"{each} narrow n={n}")
        assert_same_bits(runs[0], runs[1], f"accumulate n={n}")
        assert_same_bits(runs[1], wild(n, 9) + x.float(), f"accumulate n={n}")
        assert_same_bits(sums[0], sums[1], f"square sums n={n}")


@pytest.mark.parametrize("isa", _cpu_adam.available_isas())
def test_square_sums_are_right(isa):
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    sums = torch.empty(10, dtype=torch.float64)
    _cpu_adam.block_square_sums(x.data_ptr(), "float32", 10_000, 1024, sums.data_ptr(), 2, isa)
    expected = [float(np.square(block.double().numpy()).sum()) for block in x.split(1024)]
    np.testing.assert_allclose(sums.numpy(), expected, rtol=1e-14)
    starts, counts, out = torch.tensor([0, 4, 9]), torch.tensor([4, 5, 1]), torch.empty(3, dtype=torch.float64)
    _cpu_adam.sum_runs(sums.data_ptr(), starts.data_ptr(), counts.data_ptr(), 3, out.data_ptr())
    assert out.tolist() == [sum(sums[:4].tolist()), sum(sums[4:9].tolist()), sums[9].item()]
    x[5000] = float("inf")
    x[7000] = float("nan")
    _cpu_adam.block_square_sums(x.data_ptr(), "float32", 10_000, 1024, sums.data_ptr(), 2, isa)
    assert sums[4].item() == float("inf")
    assert sums[6].isnan()


# Without torch, which takes longer to import than all else here.
CHILD = """
import sys
import numpy as np
from zofftk import _cpu_adam
if len(sys.argv) > 2: _cpu_adam._mask_features(sys.argv[2].split(","))
print(_cpu_adam.isa())
for dtype in ("float32", "bfloat16", "float16"):
    make = np.random.default_rng(3)
    master, exp_avg, exp_avg_sq = make.standard_normal(1037, np.float32), *np.zeros((2, 1037), np.float32)
    out = np.zeros(1037, np.float32 if dtype == "float32" else np.uint16)
    for step in range(1, 6):
        grad = make.standard_normal(1037, np.float32)
        if dtype == "float16": grad = grad.astype(np.float16)
        if dtype == "bfloat16": grad = (grad.view(np.uint32) >> 16).astype(np.uint16)
        _cpu_adam.adam_step(*(x.ctypes.data for x in (master, exp_avg, exp_avg_sq, grad)), dtype, out.ctypes.data,
                            dtype, 1037, step=step, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2,
                            decoupled=True, grad_scale=1.0, threads=2)
    assert out.any()
    print(*(x.tobytes().hex() for x in (master, exp_avg, exp_avg_sq, out)))
"""


def child(isa: str | None, *arguments: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "ZOFFTK_ISA"}
    if isa is not None:
        env["ZOFFTK_ISA"] = isa
    return subprocess.run(
        [sys.executable, "-c", CHILD, "x", *arguments], env=env, capture_output=True, text=True, timeout=120
    )


def test_b15_forced_levels_agree():
    results = {isa: child(isa) for isa in _cpu_adam.available_isas()}
    for isa, result in results.items():
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[0] == isa
    assert len({tuple(result.stdout.splitlines()[1:]) for result in results.values()}) == 1


@pytest.fixture
def mask():
    yield _cpu_adam._mask_features
    _cpu_adam._mask_features(_ALL_FEATURES)


_ALL_FEATURES = _cpu_adam.cpu_features()


@pytest.mark.skipif("avx512" not in VECTOR_ISAS, reason="needs AVX-512")
def test_b15_masked_processor(mask, monkeypatch):
    monkeypatch.delenv("ZOFFTK_ISA", raising=False)
    masked = child(None, ",".join(f for f in _ALL_FEATURES if f != "avx512f"))
    assert masked.returncode == 0, masked.stderr
    assert masked.stdout.splitlines()[0] == "avx2"
    for features, expected in ((_ALL_FEATURES, "avx512"), (["avx2", "fma", "f16c"], "avx2"), (["avx2"], "scalar")):
        mask(features)
        assert _cpu_adam.isa() == expected == _cpu_adam.available_isas()[0]
    monkeypatch.setenv("ZOFFTK_ISA", "avx512")
    mask(["avx2", "fma", "f16c"])
    with pytest.raises(RuntimeError, match="'avx512' was asked for, but this processor lacks: avx512f"):
        _cpu_adam.isa()


def test_b15_unknown_level(mask, monkeypatch):
    monkeypatch.setenv("ZOFFTK_ISA", "sse9")
    mask(_ALL_FEATURES)
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'; expected one of: "):
        kernel_step(torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3))
