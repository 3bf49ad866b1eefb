"""The kernel's numbers, its checks, and its speed, through the documented functions."""

import itertools
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.compare import assert_same_bits, assert_within_ulp
from tests.kernel import DTYPES, kernel_step, wild
from tests.reference.adam import adam_float64, adamw_float32
from zofftk import _cpu_adam
from zofftk.cpu_adam import adam_step, adamw_step
from zofftk.threads import usable_threads

FULL_LENGTHS = [*range(1, 68), 127, 128, 129, 255, 1023, 1025, 4097]


def ordinary(n, seed=0):
    make = torch.Generator().manual_seed(seed)
    p, m, g = (torch.randn(n, generator=make) for _ in range(3))
    return p * 1e-2, m * 1e-3, torch.rand(n, generator=make) * 1e-5, g * 1e-2


def torch_step(kind, p, m, v, g, *, step, **options):
    p = p.clone().requires_grad_(True)
    p.grad = g.float()
    optimizer = kind([p], foreach=False, **options)
    optimizer.state[p] = dict(step=torch.tensor(float(step - 1)), exp_avg=m.clone(), exp_avg_sq=v.clone())
    optimizer.step()
    return p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
@pytest.mark.parametrize("step", [1, 2, 10, 100_000])
@pytest.mark.parametrize("function", [adamw_step, adam_step])
def test_close_to_torch(function, step, dtype):
    """Moments have torch's bits. The parameter may be 4 ulp away: torch's vector sqrt is not correctly rounded."""
    p, m, v, g = ordinary(20_011)
    g = g.to(dtype)
    options = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step)
    kind = torch.optim.AdamW if function is adamw_step else torch.optim.Adam
    expected = torch_step(kind, p, m, v, g, **options)
    got = p.clone(), m.clone(), v.clone()
    function(*got, g, **options)
    used = g.double() if function is adamw_step else g.double() + 0.1 * p.double()
    terms = ((expected[0].double() - p.double()).abs(), (used * 0.1).abs(), used**2 * 0.05)
    for name, new, want, old, term in zip(("p", "m", "v"), got, expected, (p, m, v), terms, strict=True):
        assert_within_ulp(new, want, torch.maximum(old.abs().double(), term), 4 if name == "p" else 2, name)


def test_bits_of_the_written_formula():
    """Ordinary elements equal the formula in NumPy's float32, operation by operation."""
    for step, beta1 in itertools.product((1, 7, 5000), (0.9, 0.3)):
        p, m, v, g = ordinary(50_000, seed=step)
        options = dict(step=step, lr=3e-3, betas=(beta1, 0.999), eps=1e-8, weight_decay=0.01, grad_scale=0.37)
        expected = adamw_float32(*(x.numpy() for x in (p, m, v, g)), **options)
        adamw_step(p, m, v, g, **options)
        for name, got, want in zip("pmv", (p, m, v), expected, strict=True):
            assert_same_bits(got, torch.from_numpy(want), f"step={step} {name}")


def test_wild_values_like_torch():
    """Any kind of element: moments within 2 ulp of torch; the parameter, given those, within the five roundings
    (each up to one ulp of a lower binade) that lie between them and it."""
    for step, decay in itertools.product((1, 10), (0.0, 0.1)):
        p, m, v, g = wild(20_000, 1), wild(20_000, 2), wild(20_000, 3).abs(), wild(20_000, 4)
        g[g.abs() > 1e30] = 1.0  # beyond, torch's g - m overflows
        m[m.abs() > 1e30] = 1.0
        options = dict(step=step, lr=1e-3, eps=1e-8, weight_decay=decay)
        expected = torch_step(torch.optim.AdamW, p, m, v, g, **options)
        new = p.clone(), m.clone(), v.clone()
        adamw_step(*new, g, **options)
        kept = p.double() * float(np.float32(1 - 1e-3 * decay))
        denom = (new[2].double().sqrt() / (1 - 0.999**step) ** 0.5).float().double() + 1e-8
        move = (new[1].double() * float(np.float32(-1e-3 / (1 - 0.9**step)))).float().double() / denom
        wants = (kept + move).float(), expected[1], expected[2]
        scales = (torch.maximum(p.abs().double(), move.abs()), torch.maximum(m.abs(), g.abs() * 0.1))
        for name, got, want, scale in zip("pmv", new, wants, (*scales, torch.maximum(v, expected[2])), strict=True):
            assert_same_bits(got.isnan().float(), want.isnan().float(), f"{name} NaN")
            finite = want.isfinite() & scale.isfinite()
            assert_within_ulp(got[finite], want[finite], scale[finite], 5 if name == "p" else 2, name)


def test_b30_decay_is_decoupled():
    def one(function, p, g, **options):
        tensors = [torch.full((33,), float(x)) for x in (p, 0, 0)]
        function(*tensors, torch.full((33,), float(g)), step=1, **options)
        assert all(torch.all(x == x[0]) for x in tensors)
        return [x[0].item() for x in tensors]

    assert one(adamw_step, 1, 0, lr=0.1, weight_decay=0.1) == [np.float32(0.99), 0, 0]
    p, m, v = one(adam_step, 1, 0, lr=0.1, weight_decay=0.1)
    assert (p, m, v) == pytest.approx((0.9, 0.01, 1e-5), rel=2e-6)
    assert one(adamw_step, 2, 1, lr=0.1, weight_decay=0.5)[0] == pytest.approx(1.8, rel=1e-6)
    for decay in (-0.0,):
        assert one(adamw_step, 1, 1, lr=0.1, weight_decay=decay)[0] == pytest.approx(0.9, rel=1e-6)
    with pytest.raises(ValueError, match=r"weight_decay: expected 0 or more, got -0\.1"):
        one(adamw_step, 1, 1, lr=0.1, weight_decay=-0.1)


CAST_BITS = [
    0x7F800001,
    0x7FFF8C22,
    0x7F800000,
    0xFF800000,
    0x3E89CCD5,
    0x3F808000,
    0x3F818000,
    0x7F7FFFFF,
    0x000116C2,
    0x80000000,
]


@pytest.mark.parametrize("isa", _cpu_adam.available_isas())
def test_b31_write_back_rounds_like_torch(isa):

    for bits, dtype, place in itertools.product(CAST_BITS, (torch.bfloat16, torch.float16), (*range(16), 16, 18)):
        p = torch.ones(19)
        p.view(torch.int32)[place] = bits - 2**32 if bits >= 2**31 else bits
        expected = p.to(dtype)
        zeros, out = torch.zeros(19), torch.empty(19, dtype=dtype)
        kernel_step(p, zeros.clone(), zeros.clone(), zeros, out, isa=isa)
        assert_same_bits(out, expected, f"{bits:#x} at {place}")
    assert torch.tensor(0.26914088).to(torch.bfloat16).item() == 0.26953125


def test_b46_any_address_that_holds_an_element():
    for n in (33, 1000):
        parts = [torch.ones(n + 1)[1:], torch.zeros(n + 1)[1:], torch.zeros(n + 1)[1:], torch.ones(n + 1)[1:]]
        adamw_step(*parts, step=1, lr=0.1, weight_decay=0.0)
        assert torch.all(parts[0] == parts[0][0])
        assert parts[0][0].item() == pytest.approx(0.9, rel=1e-6)


def good():
    return dict(
        param=torch.ones(8), exp_avg=torch.zeros(8), exp_avg_sq=torch.zeros(8), grad=torch.ones(8), step=1, lr=0.1
    )


FREED = torch.ones(8)
FREED.untyped_storage().resize_(0)
BAD = [
    (dict(param=torch.ones(8, device="meta")), ValueError, "param: expected a tensor on device cpu, got device meta"),
    (dict(grad=torch.ones(8, device="meta")), ValueError, "grad: .*device meta"),
    (dict(param=[1.0] * 8), TypeError, "param: expected a torch.Tensor, got list"),
    (dict(param=torch.ones(8, dtype=torch.float64)), TypeError, "param: expected dtype torch.float32, got torch.fl"),
    (dict(exp_avg=torch.zeros(8).bfloat16()), TypeError, "exp_avg: expected dtype"),
    (dict(grad=torch.ones(8, dtype=torch.int32)), TypeError, "grad: expected dtype torch.float32 or"),
    (dict(grad=torch.ones(8, dtype=torch.complex64)), TypeError, "grad: expected dtype"),
    (dict(grad=torch.ones(8).to_sparse()), ValueError, "grad: expected a dense tensor"),
    (dict(grad=torch.ones(9)), ValueError, "grad: expected 8 elements as in param, got 9"),
    (dict(exp_avg_sq=torch.zeros(16)[::2]), ValueError, "exp_avg_sq: expected a contiguous tensor"),
    (dict(grad=FREED), ValueError, "grad: expected 32 bytes of storage, got 0"),
    (dict(out=torch.empty(7)), ValueError, "out: expected 8 elements"),
    (dict(step=0), ValueError, "step: expected 1 or more, got 0"),
    (dict(lr=-1.0), ValueError, "lr: expected 0 or more, got -1.0"),
    (dict(lr=float("nan")), ValueError, "lr: expected"),
    (dict(eps=-1e-8), ValueError, "eps: expected"),
    (dict(betas=(1.0, 0.9)), ValueError, r"betas\[0\]: expected 0 <= beta < 1, got 1.0"),
    (dict(threads=0), ValueError, "threads: expected 1 or more, got 0"),
    (dict(threads=2**31), ValueError, r"threads: expected less than 2\*\*31, got 2147483648"),
    (dict(threads=1.5), TypeError, "threads: expected a whole number, got 1.5"),
    (dict(step=1.5), TypeError, "step: expected a whole number, got 1.5"),
    (dict(step=2**63), ValueError, r"step: expected less than 2\*\*63, got"),
    (dict(betas=(0.9,)), ValueError, r"betas: expected two numbers, got \(0.9,\)"),
    (dict(betas=(0.9, 0.99, 0.999)), ValueError, "betas: expected two numbers"),
    (dict(betas=0.9), ValueError, "betas: expected two numbers, got 0.9"),
    (dict(betas=(0.9, "b")), TypeError, r"betas\[1\]: expected a number, got 'b'"),
    (dict(lr="0.1"), TypeError, "lr: expected a number, got '0.1'"),
    (dict(eps=None), TypeError, "eps: expected a number, got None"),
    (dict(weight_decay=torch.ones(2)), TypeError, "weight_decay: expected a number"),
    (dict(grad_scale=1j), TypeError, "grad_scale: expected a number, got 1j"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[b[2][:40] for b in BAD])
def test_b46_bad_arguments_are_named(change, error, message):
    arguments = good() | change
    with pytest.raises(error, match=message):
        adamw_step(**arguments)
    for name, value in good().items():
        if name not in change and isinstance(value, torch.Tensor):
            assert_same_bits(arguments[name], value, f"{name} changed before the error")


def test_overlapping_buffers_are_refused():
    base = torch.zeros(12)
    for first, second in itertools.combinations(("param", "exp_avg", "exp_avg_sq", "grad", "out"), 2):
        if (first, second) == ("grad", "out"):
            continue
        with pytest.raises(ValueError, match="expected buffers that do not overlap"):
            adamw_step(**(good() | {first: base[:8], second: base[4:]}))
    with pytest.raises(ValueError, match="overlap"):
        adamw_step(**(good() | dict(grad=base[:8], out=base[4:])))
    assert not base.any()


def test_b55_pieces_of_one_step_are_equal():
    whole, pieces = ordinary(3000), [tuple(x.clone() for x in ordinary(3000)) for _ in range(2)]
    for step in (*range(1, 11), 11, 12, 13, 20):
        betas = (0.9, 0.999) if step <= 10 else (0.8, 0.99)
        adamw_step(*whole, step=step, lr=1e-3, betas=betas)
        for tensors, cut in zip(pieces, (999, 64), strict=True):
            for part in (slice(0, cut), slice(cut, 3000)):
                adamw_step(*(x[part] for x in tensors), step=step, lr=1e-3, betas=betas)
            for got, want in zip(tensors, whole, strict=True):
                assert_same_bits(got, want, f"step {step} cut {cut}")


def test_b66_small_gradients_count():
    p, m, v = torch.ones(40), torch.zeros(40), torch.zeros(40)
    adamw_step(p, m, v, torch.full((40,), 2.0**-24, dtype=torch.float16), step=1, lr=0.1, weight_decay=0.0)
    assert torch.all(p == p[0])
    assert p[0].item() == pytest.approx(0.9143669, rel=1e-6)
    assert m[0].item() == pytest.approx(5.9605e-9, rel=1e-4)


def test_b66_subnormal_moments_decay_exactly():
    for value in (1e-40, 1e-44, 2.0**-126, 1.4e-45):
        p, m, v, g = torch.zeros(64), torch.full((64,), value), torch.full((64,), value), torch.zeros(64)
        expected = torch_step(torch.optim.AdamW, p, m, v, g, step=3, lr=1e-3, weight_decay=0.1)
        adamw_step(p, m, v, g, step=3, lr=1e-3, weight_decay=0.1)
        for name, got, want in zip("pmv", (p, m, v), expected, strict=True):
            assert_within_ulp(got, want, want, 2, f"{value} {name}")


def test_b66_subnormal_moments_are_not_slow():
    n, samples = 8_000_000, {1e-3: [], 1e-40: []}
    p, v, g = torch.full((n,), 0.5), torch.full((n,), 1e-5), torch.zeros(n)
    for _ in range(7):
        for value, times in samples.items():
            m = torch.full((n,), value)
            start = time.perf_counter()
            adamw_step(p, m, v, g, step=10, lr=1e-3)
            times.append(time.perf_counter() - start)
    ratio = statistics.median(samples[1e-40]) / statistics.median(samples[1e-3])
    limit = {"avx512": 3.0, "avx2": 6.0, "scalar": 30.0}[_cpu_adam.isa()]
    assert ratio <= limit, f"subnormal moments cost {ratio:.2f}x (limit {limit})"
    assert (torch.tensor([1e-40]) * 1.0).item() != 0.0


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_b70_every_element_moves(dtype):
    expected = torch.tensor(0.9).to(dtype)
    for n in FULL_LENGTHS:
        p, m, v, g = torch.ones(n), torch.zeros(n), torch.zeros(n), torch.ones(n, dtype=dtype)
        guarded = torch.full((n + 32,), 7.0, dtype=dtype)
        adamw_step(p, m, v, g, step=1, lr=0.1, weight_decay=0.0, out=guarded[16 : n + 16])
        assert torch.all(p == p[0])
        assert p[0].item() == pytest.approx(0.9, rel=1e-6)
        assert_same_bits(guarded[16 : n + 16], p.to(dtype), f"n={n}")
        assert dtype == torch.float32 or torch.all(guarded[16 : n + 16] == expected)
        assert torch.all(guarded[:16] == 7)
        assert torch.all(guarded[n + 16 :] == 7)


def test_b84_eps_is_added_after_the_correction():
    p, m, v = torch.zeros(5), torch.zeros(5), torch.zeros(5)
    adamw_step(p, m, v, torch.full((5,), 1e-8), step=1, lr=1e-3, eps=1e-8, weight_decay=0.0)
    assert -p[4].item() == pytest.approx(5.0e-4, rel=1e-4)


def test_many_steps_stay_close_to_float64():
    p, m, v, _ = ordinary(1000)
    m, v = torch.zeros(1000), torch.zeros(1000)
    exact = p.numpy(), m.numpy(), v.numpy()
    make = torch.Generator().manual_seed(5)
    for step in range(1, 101):
        g = torch.randn(1000, generator=make) * 1e-2
        exact = adam_float64(*exact, g.numpy(), step=step, lr=1e-3, weight_decay=0.1)
        adamw_step(p, m, v, g, step=step, lr=1e-3, weight_decay=0.1)
    for got, want in zip((p, m, v), exact, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=2e-7)


def test_autograd_notices_the_change():
    p = torch.ones(8, requires_grad=True)
    loss = (p * p).sum()
    with torch.no_grad():
        adamw_step(p, torch.zeros(8), torch.zeros(8), torch.ones(8), step=1, lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_b27_not_slower_than_fused_torch():
    n, threads = 32_000_000, usable_threads()
    p, m, v, g = torch.ones(n), torch.zeros(n), torch.zeros(n), torch.ones(n)
    reference = torch.ones(n, requires_grad=True)
    reference.grad = g
    fused = torch.optim.AdamW([reference], fused=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    ours, theirs = [], []
    try:
        for step in range(1, 8):
            start = time.perf_counter()
            adamw_step(p, m, v, g, step=step, lr=1e-3, threads=threads)
            middle = time.perf_counter()
            fused.step()
            ours.append(middle - start)
            theirs.append(time.perf_counter() - middle)
    finally:
        torch.set_num_threads(before)
    ratio = statistics.median(ours[2:]) / statistics.median(theirs[2:])
    assert ratio <= 1.2, f"{ratio:.2f} times the time of torch's fused AdamW"


MISSING_KERNEL = """
import sys
sys.modules["zofftk._cpu_adam"] = None
import torch, zofftk
for statement in (
    "import zofftk.cpu_adam", "import zofftk.cpu_kernels", "import zofftk.clipping", "import zofftk.bench.cpu_adam",
    "zofftk.OffloadAdamW([torch.nn.Parameter(torch.ones(1))])", "zofftk.CPUAdamW([torch.nn.Parameter(torch.ones(1))])",
):
    try:
        exec(statement)
    except ImportError as error:
        print(error)
"""


def test_missing_kernel_is_one_clear_error():
    command = [sys.executable, "-c", MISSING_KERNEL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()
    assert len(said) == 6
    for line in said:
        assert line.startswith("zofftk's compiled CPU Adam (zofftk._cpu_adam) is missing")
        assert "C++17 compiler" in line
