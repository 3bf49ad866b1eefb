"""Lion and SGD: the written formula bit for bit, on every instruction set, for all sizes, threads and values."""

import itertools
import statistics
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compare import assert_same_bits
from tests.kernel import DTYPES, NAMES, wild
from tests.reference.moment import lion_float32, sgd_float32
from zofftk import _cpu_adam

ISAS = _cpu_adam.available_isas()
SIZES = [*range(36), 63, 64, 65, 255, 1025]
LION = dict(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1)
SGD = dict(lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.1, nesterov=False, first=False)
RULES = {
    "lion": LION,
    "lion without decay": {**LION, "weight_decay": 0.0},
    "sgd": {**SGD, "momentum": 0.0},
    "momentum": {**SGD, "weight_decay": 0.0},
    "decay": SGD,
    "first": {**SGD, "first": True, "dampening": 0.5},
    "dampening": {**SGD, "dampening": 0.5},
    "nesterov": {**SGD, "nesterov": True},
    "first nesterov": {**SGD, "nesterov": True, "first": True},
}


def step(p, m, g, out=None, *, grad_scale=1.0, threads=1, isa="", **options):
    own = [0 if out is None else out.data_ptr(), "" if out is None else NAMES[out.dtype], p.numel()]
    common = dict(grad_scale=grad_scale, threads=threads, isa=isa)
    if "beta1" in options:
        return _cpu_adam.lion_step(p.data_ptr(), m.data_ptr(), g.data_ptr(), NAMES[g.dtype], *own, **options, **common)
    moment = m.data_ptr() if options["momentum"] else 0
    return _cpu_adam.sgd_step(p.data_ptr(), moment, g.data_ptr(), NAMES[g.dtype], *own, **options, **common)


def formula(p, m, g, **options):
    function = lion_float32 if "beta1" in options else sgd_float32
    with np.errstate(all="ignore"):
        new = function(p.numpy(), m.numpy(), g.float().numpy(), **options)
    return [torch.from_numpy(np.asarray(x)) for x in new]


def check(isa, n, grad_dtype, out_dtype, *, offset=0, seed=0, threads=1, **options):
    """A step on slices of larger buffers gives the formula's bits, and leaves what is around them alone."""
    total = n + offset + 9
    tensors = [wild(total, seed), wild(total, seed + 1), wild(total, seed + 3).to(grad_dtype)]
    if out_dtype is not None:
        tensors.append(torch.full((total,), 7.0, dtype=out_dtype))
    before = [tensor.clone() for tensor in tensors]
    p, m, g, *out = (tensor[offset : offset + n] for tensor in tensors)
    expected = formula(*(x[offset : offset + n] for x in before[:3]), **options)
    step(p, m, g, *out, threads=threads, isa=isa, **options)
    what = f"{isa} n={n} {options}"
    assert_same_bits(p, expected[0], f"p, {what}")
    assert_same_bits(m, expected[1], f"m, {what}")
    if out:
        assert_same_bits(out[0], p.to(out_dtype), f"out, {what}")
    for tensor, old in zip(tensors, before, strict=True):
        assert_same_bits(tensor[:offset], old[:offset], "guard before")
        assert_same_bits(tensor[offset + n :], old[offset + n :], "guard after")
    assert_same_bits(tensors[2], before[2], "gradient")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grad_dtype", list(DTYPES.values()), ids=str)
def test_sizes_and_dtypes(isa, rule, grad_dtype):
    for n, out_dtype in itertools.product(SIZES, (None, grad_dtype)):
        check(isa, n, grad_dtype, out_dtype, offset=n % 5, seed=n, grad_scale=0.37, **RULES[rule])
    for out_dtype in DTYPES.values():
        check(isa, 1037, grad_dtype, out_dtype, seed=7, **RULES[rule])


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(0, 300), offset=st.integers(0, 17), seed=st.integers(0, 2**20), lr=st.floats(0, 10),
    beta1=st.floats(0, 0.9999), beta2=st.floats(0, 0.99999), weight_decay=st.floats(0, 1), momentum=st.floats(0, 1.5),
    dampening=st.floats(-1, 1), nesterov=st.booleans(), first=st.booleans(), lion=st.booleans(),
    grad_scale=st.sampled_from([1.0, -1.0, 2.0**-16, 3e-3, 0.0]), grad=st.sampled_from(list(DTYPES.values())),
    out=st.sampled_from([None, *DTYPES.values()]),
)  # fmt: skip
def test_any_step(n, offset, seed, grad, out, lion, lr, weight_decay, grad_scale, beta1, beta2, momentum, **rest):
    own = dict(beta1=beta1, beta2=beta2) if lion else dict(momentum=momentum, **rest)
    if not lion and np.float32(weight_decay) == 0.0:
        weight_decay = 0.0  # NaN parameters aside, what is added is a zero
    for isa in ISAS:
        options = dict(lr=lr, weight_decay=weight_decay, grad_scale=grad_scale, **own)
        check(isa, n, grad, out, offset=offset, seed=seed, **options)


@pytest.fixture
def chunk():
    yield _cpu_adam._set_chunk
    _cpu_adam._set_chunk(0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", ["lion", "nesterov", "sgd"])
def test_threads_and_chunks_change_nothing(isa, rule, chunk):
    for elements, threads in itertools.product((64, 192, 4096), (1, 2, 3, 7)):
        chunk(elements)
        check(isa, 5003, torch.bfloat16, torch.bfloat16, threads=threads, **RULES[rule])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", ["lion", "nesterov", "sgd"])
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_out_may_be_grad(isa, rule, dtype):
    p, m, g = wild(1037, 1), wild(1037, 2), wild(1037, 4).to(dtype)
    expected = formula(p, m, g, **RULES[rule])
    step(p, m, g, g, isa=isa, **RULES[rule])
    assert_same_bits(p, expected[0])
    assert_same_bits(m, expected[1])
    assert_same_bits(g, p.to(dtype))


@pytest.mark.parametrize("rule", ["lion", "nesterov", "sgd"])
def test_overlapping_buffers_are_refused(rule):
    base, options = torch.zeros(12), RULES[rule]
    names = ("p", "m", "g", "out")
    for first, second in itertools.combinations(names, 2):
        if "m" in (first, second) and rule == "sgd":
            continue
        tensors = {name: torch.zeros(8) for name in names} | {first: base[:8], second: base[4:]}
        with pytest.raises(ValueError, match="expected buffers that do not overlap"):
            step(*tensors.values(), **options)
    assert not base.any()


def test_bad_arguments_are_named():
    p = torch.zeros(8)
    with pytest.raises(ValueError, match="exp_avg: expected an address, got 0"):
        _cpu_adam.lion_step(p.data_ptr(), 0, p.data_ptr(), "float32", 0, "", 8, grad_scale=1.0, threads=1, **LION)
    for momentum, address in ((0.9, 0), (0.0, torch.zeros(8).data_ptr())):
        options = {**SGD, "momentum": momentum, "grad_scale": 1.0, "threads": 1}
        with pytest.raises(ValueError, match="momentum_buffer: expected an address where momentum is not 0"):
            _cpu_adam.sgd_step(p.data_ptr(), address, p.data_ptr(), "float32", 0, "", 8, **options)
    with pytest.raises(ValueError, match="threads: expected 1 or more, got 0"):
        step(p, torch.zeros(8), torch.zeros(8), threads=0, **LION)


@pytest.mark.parametrize("isa", ISAS)
def test_a_sign_of_nothing_is_nothing(isa):
    p, m, g = torch.tensor([1.0, -0.0, 0.0, 3.0, 2.0]), torch.zeros(5), torch.tensor([0.0, 0.0, -0.0, 1e-45, torch.nan])
    step(p, m, g, isa=isa, **{**LION, "weight_decay": 0.0, "beta1": 0.0})
    assert_same_bits(p, torch.tensor([1.0, -0.0, 0.0, 2.99, torch.nan]))
    assert m[4].isnan()


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])
def test_subnormal_moments_are_not_slow(isa):
    """A moment that only decays stays subnormal for ever: 1e-44 * 0.99 rounds to itself."""
    n, samples = 16384, {1e-3: [], 1e-44: []}
    p, g = torch.full((n,), 0.5), torch.zeros(n)
    for _ in range(60):
        for value, times in samples.items():
            m = torch.full((n,), value)
            start = time.perf_counter()
            step(p, m, g, isa=isa, **LION)
            times.append(time.perf_counter() - start)
    ratio = statistics.median(samples[1e-44]) / statistics.median(samples[1e-3])
    assert ratio <= 8.0, f"subnormal moments cost {ratio:.2f}x"
