"""Every kernel against its eager twin: on a CUDA device, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1).

`test_triton_kernels.py` runs this file in the interpreter, in a process of its own.
"""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pytest
import torch

from tests.compare import assert_same_bits
from zofftk.triton_kernels import (
    BLOCK_NUMEL,
    CopyBackPlan,
    PackPlan,
    Range,
    copy_back,
    count_blocks,
    grad_stats,
    launch,
    pack,
    reference,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = list(itertools.product(DTYPES, DTYPES))
SIZES = [0, 1, 2, 31, 33, 257, BLOCK_NUMEL, BLOCK_NUMEL + 8, 65537]
ALIGNMENTS = {"aligned": (0, 64), "source off": (1, 64), "flat off": (0, 3), "both off": (3, 1)}
COMMON = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
GRID = [(*pair, a) for pair in PAIRS for a in ALIGNMENTS if pair in COMMON or a in ("aligned", "both off")]
GUARD = 7.0

if not INTERPRETED:
    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter runs them too"),
    ]


@pytest.fixture(autouse=True)
def _numpy_overflows_silently():
    """The interpreter casts with numpy, which warns where a value becomes infinite."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=INTERPRETED)
def _hints_are_true(monkeypatch):
    """The interpreter ignores what a kernel says of its alignment; a GPU would fault where it is not so."""
    from triton.runtime.interpreter import TensorHandle

    before = TensorHandle.set_attr

    def set_attr(handle, name, values):
        if name == "tt.divisibility":
            divisor = values[0] if isinstance(values, list | tuple) else values
            assert (handle.data % np.uint64(divisor) == 0).all(), (
                f"address {handle.data}, said to be on {divisor} bytes"
            )
        before(handle, name, values)

    monkeypatch.setattr(TensorHandle, "set_attr", set_attr)


def values(numel: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Numbers over many magnitudes, subnormals and ties of every dtype among them; `shift` elements off 16 bytes."""
    magnitude = torch.exp2(torch.randint(-30, 14, (numel,)).float())
    numbers = torch.randn(numel) * magnitude
    numbers[::5] = numbers[::5].bfloat16().float() * (1 + 2.0**-8)
    numbers[3::7] = torch.randn(numbers[3::7].shape) * 1e-7
    storage = torch.empty(numel + shift, dtype=dtype, device=DEVICE)
    tensor = storage[shift:]
    return tensor.copy_(numbers.to(dtype))


def ranges_of(tensors, step: int, gap: int):
    """One range a tensor, each a multiple of `step` (or `gap` elements) behind the one before; the flat's length."""
    ranges, offset, block = [], step, 0
    for tensor in tensors:
        ranges.append(Range(tensor, 0, tensor.numel(), offset, block))
        offset += -(-(tensor.numel() + gap) // step) * step
        block += count_blocks(tensor.numel())
    return ranges, offset


def assert_sums(sums: torch.Tensor, ranges, flat: torch.Tensor) -> None:
    """n - 1 rounded additions of exact squares: relative error below (n - 1) 2^-53, both against the exact sum."""
    for r in ranges:
        blocks = flat[r.offset : r.offset + r.stop - r.start].double().cpu().split(BLOCK_NUMEL)
        for block, got in zip(blocks, sums[r.block :].tolist(), strict=False):
            if block.numel() == 0:
                continue
            exact = math.fsum(block.square().tolist()) if block.isfinite().all() else float(block.square().sum())
            if math.isfinite(exact):
                assert abs(got - exact) <= BLOCK_NUMEL * 2.0**-53 * exact
            else:
                assert not math.isfinite(got)


def assert_packs_like_the_twin(ranges, flat_numel: int, dtype: torch.dtype) -> None:
    num_blocks = max((r.block + r.span.num_blocks for r in ranges), default=0)
    results = []
    for function in (pack, reference.pack):
        flat = torch.full((flat_numel,), GUARD, dtype=dtype, device=DEVICE)
        sums = torch.full((num_blocks + 2,), -1.0, dtype=torch.float64, device=DEVICE)
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        versions = [tensor._version for tensor in (flat, sums, flag)]
        function(ranges, flat, sums, flag)
        assert flat._version > versions[0]
        assert sums[num_blocks:].tolist() == [-1.0, -1.0]
        assert_sums(sums, ranges, flat)
        assert flag.item() == int(not sums.isfinite().all())
        results.append((flat, flag))
    assert_same_bits(results[0][0], results[1][0], "flat")
    assert_same_bits(results[0][1].float(), results[1][1].float(), "flag")


@pytest.mark.parametrize(("source", "wire", "alignment"), GRID, ids=str)
def test_pack(source, wire, alignment):
    shift, step = ALIGNMENTS[alignment]
    ranges, numel = ranges_of([values(size, source, shift) for size in SIZES], step, gap=2)
    assert_packs_like_the_twin(ranges, numel, wire)


@pytest.mark.parametrize(("wire", "target", "alignment"), GRID, ids=str)
def test_copy_back(wire, target, alignment):
    shift, step = ALIGNMENTS[alignment]
    results = []
    for function in (copy_back, reference.copy_back):
        torch.manual_seed(1)
        storages = [torch.full((size + shift + 9,), GUARD, dtype=target, device=DEVICE) for size in SIZES]
        ranges, numel = ranges_of([s[shift : s.numel() - 9] for s in storages], step, gap=2)
        function(values(numel, wire), ranges)
        assert all(r.tensor._version > 0 for r in ranges)
        results.append(torch.cat(storages))
    assert_same_bits(*results)
    assert (results[0][-9:] == GUARD).all()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grad_stats(dtype, shift):
    for size in SIZES:
        flat = values(size, dtype, shift)
        sums = torch.full((count_blocks(size) + 1,), -1.0, dtype=torch.float64, device=DEVICE)
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        grad_stats(flat, sums, flag)
        assert_sums(sums, [Range(flat, 0, size, 0, 0)], flat)
        assert (sums[-1].item(), flag.item()) == (-1.0, 0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, BLOCK_NUMEL - 1, 2 * BLOCK_NUMEL, 2 * BLOCK_NUMEL + 30])
def test_one_value_that_is_not_finite_raises_the_flag(bad, at):
    tensor = values(2 * BLOCK_NUMEL + 31, torch.bfloat16)
    flat = torch.empty_like(tensor)
    sums = torch.empty(3, dtype=torch.float64, device=DEVICE)
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    pack([Range(tensor, 0, tensor.numel(), 0)], flat, sums, flag)
    assert flag.item() == 0
    tensor[at] = bad
    pack([Range(tensor, 0, tensor.numel(), 0)], flat, sums, flag)
    assert flag.item() == 1
    assert (~sums.isfinite()).nonzero().flatten().tolist() == [at // BLOCK_NUMEL]
    pack([Range(values(5, torch.bfloat16), 0, 5, 0)], flat, sums, flag)
    assert flag.item() == 1, "it stays until the caller zeroes it"
    flag.zero_()
    grad_stats(tensor, sums, flag)
    assert flag.item() == 1


def test_float32_extremes_are_finite_and_what_overflows_the_wire_is_not():
    tensor = torch.full((BLOCK_NUMEL,), torch.finfo(torch.float32).max, device=DEVICE)
    for wire, expected in ((torch.float32, 0), (torch.bfloat16, 1), (torch.float16, 1)):
        flat = torch.empty(BLOCK_NUMEL, dtype=wire, device=DEVICE)
        sums = torch.empty(1, dtype=torch.float64, device=DEVICE)
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        pack([Range(tensor, 0, BLOCK_NUMEL, 0)], flat, sums, flag)
        assert flag.item() == expected, wire


def test_every_bfloat16_rounding():
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] + lower).flatten()
    tensor = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32).to(DEVICE)
    flat = torch.empty(tensor.numel(), dtype=torch.bfloat16, device=DEVICE)
    pack([Range(tensor, 0, tensor.numel(), 0)], flat)
    assert_same_bits(flat, tensor.bfloat16())


@pytest.mark.parametrize(("source", "wire"), [p for p in PAIRS if p[0] != torch.float32], ids=str)
def test_every_16_bit_value(source, wire):
    tensor = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(source).to(DEVICE)
    flat = torch.empty(tensor.numel(), dtype=wire, device=DEVICE)
    pack([Range(tensor, 0, tensor.numel(), 0)], flat)
    assert_same_bits(flat, tensor.to(wire))
    if source == wire:
        assert torch.equal(flat.view(torch.int16), tensor.view(torch.int16)), "a move keeps the payload of NaN too"


def odd_layouts(dtype=torch.float32):
    base = values(9000, dtype)
    return [
        base.view(90, 100).t(),
        base[:7200].view(2, 36, 10, 10).to(memory_format=torch.channels_last),
        base[::3],
        base[5].view(()),
        base[:600].view(20, 30)[:, 3:17],
        torch.view_as_complex(base[:400].view(-1, 2)).conj().imag,
        torch._neg_view(base[:77]),
    ]


def test_pack_of_odd_layouts_and_parts():
    tensors = odd_layouts()
    ranges, numel = ranges_of(tensors, 1, gap=3)
    assert_packs_like_the_twin(ranges, numel, torch.bfloat16)
    assert_packs_like_the_twin([Range(tensors[0], BLOCK_NUMEL, 8999, 5, 1)], BLOCK_NUMEL * 2, torch.float32)


def test_copy_back_to_odd_layouts_and_parts():
    results = []
    for function in (copy_back, reference.copy_back):
        torch.manual_seed(1)
        tensors = [tensor for tensor in odd_layouts() if not tensor.is_neg()]
        tensors = [torch.empty_strided(t.shape, t.stride(), device=DEVICE).fill_(GUARD) for t in tensors]
        ranges, numel = ranges_of(tensors, 1, gap=3)
        ranges[0] = ranges[0]._replace(start=BLOCK_NUMEL, stop=8999)
        function(values(numel, torch.float32), ranges)
        results.append(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    assert_same_bits(*results)
    assert (results[0][:BLOCK_NUMEL] == GUARD).all()


def test_a_plan_serves_new_tensors_of_mixed_dtypes():
    dtypes = [DTYPES[i % 3] for i in range(len(SIZES))]
    ranges, numel = ranges_of([values(s, d) for s, d in zip(SIZES, dtypes, strict=True)], 64, gap=0)
    spans = [r.span for r in ranges]
    down, up = PackPlan(spans, dtypes, DEVICE), CopyBackPlan(spans, dtypes, DEVICE)
    for repeat in range(5):
        tensors = [values(s, d, shift=repeat % 2) for s, d in zip(SIZES, dtypes, strict=True)]
        flat = torch.zeros(numel, device=DEVICE)
        sums = torch.full((ranges[-1].block + count_blocks(SIZES[-1]),), -1.0, dtype=torch.float64, device=DEVICE)
        down(tensors, flat, sums)
        assert_sums(sums, ranges, flat)
        copies = [torch.zeros_like(tensor) for tensor in tensors]
        for _ in range(2):  # the second time the addresses are still there
            up(flat, copies)
        for copy, tensor in zip(copies, tensors, strict=True):
            assert_same_bits(copy, tensor)


def test_a_write_in_the_middle_of_a_backward_is_caught():
    weight = torch.ones(BLOCK_NUMEL, device=DEVICE, requires_grad=True)
    hidden = (torch.ones(BLOCK_NUMEL, device=DEVICE, requires_grad=True) * weight).sin()
    hidden.register_hook(lambda grad: copy_back(torch.zeros_like(grad), [Range(weight, 0, BLOCK_NUMEL, 0)]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


def test_addresses_beyond_two_to_the_31_elements():
    """The tables say element 2^32 and more; the addresses are as much lower, so that real memory is met."""
    kernels = launch.load_kernels()
    first, numel, start, offset = 2**20, BLOCK_NUMEL + 100, 7, 2**33 + 5
    done = first * BLOCK_NUMEL  # elements of the range before this launch's first program
    source, flat = values(numel, torch.float32), torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    back, sums = torch.empty_like(source), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    rows = torch.tensor([[start, start + done + numel, offset, -first, 0]], device=DEVICE)
    ranges = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    flat_address = flat.data_ptr() - 2 * (offset + done)
    for tensor in (source, back):
        address = torch.tensor([tensor.data_ptr() - 4 * (start + done)], device=DEVICE)
        args = (2, source.device, address, ranges, rows, flat_address)
        if tensor is source:
            constants = {"SOURCE": "float32", "TARGET": "bfloat16", "SUMS": True, "FLAG": False}
            launch.enqueue(kernels.pack_kernel, *args, sums, None, **constants)
        else:
            launch.enqueue(kernels.copy_back_kernel, *args, SOURCE="bfloat16", TARGET="float32")
    assert_same_bits(flat, source.bfloat16())
    assert_same_bits(back, source.bfloat16().float())
    assert_sums(sums, [Range(flat, 0, numel, 0, 0)], flat)


needs_gpu = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")


@needs_gpu
def test_full_size_at_random_alignment():
    sizes = torch.randint(0, 3_000_000, (100,)).tolist()
    ranges, numel = ranges_of([values(size, torch.bfloat16, size % 9) for size in sizes], 1, gap=5)
    assert_packs_like_the_twin(ranges, numel, torch.bfloat16)
    flat = values(numel, torch.bfloat16)
    copies = [torch.empty_like(r.tensor) for r in ranges]
    copy_back(flat, [r._replace(tensor=copy) for r, copy in zip(ranges, copies, strict=True)])
    for r, copy in zip(ranges, copies, strict=True):
        assert_same_bits(copy, flat[r.offset : r.offset + r.stop])


@needs_gpu
def test_more_than_two_to_the_31_elements():
    numel = 2**31 + 17
    if torch.cuda.get_device_properties(0).total_memory < 24e9:
        pytest.skip("needs 24 GB of device memory")
    tensor = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    tensor[2**31 - 8 :] = values(25, torch.bfloat16)
    flat = torch.full((numel + 5,), GUARD, dtype=torch.bfloat16, device=DEVICE)
    sums = torch.full((count_blocks(numel) + 1,), -1.0, dtype=torch.float64, device=DEVICE)
    pack([Range(tensor, 0, numel, 3)], flat, sums)
    assert_same_bits(flat[-40:-2], tensor[-38:])
    assert (torch.cat([flat[:3], flat[-2:]]) == GUARD).all()
    assert sums[:-3].count_nonzero() == 0
    assert sums[-1].item() == -1.0
    assert_sums(sums[-2:], [Range(tensor, 0, 17, 0, 0)], tensor[2**31 :])
    back = torch.zeros_like(tensor)
    copy_back(flat, [Range(back, 0, numel, 3)])
    assert_same_bits(back[-40:], tensor[-40:])
