"""The device code, and the only file here that imports Triton.

A launch has one program for each block of BLOCK_NUMEL elements, counted from the start of each range. A program looks
up its range, adds everything up in int64, and moves its block: in one go when both ends lie on 16 bytes and the
number of elements is a multiple of 8 (full blocks and most tails), otherwise CHUNK_NUMEL elements at a time.

bfloat16 is moved as its 16 bits, widened and rounded by integer arithmetic. That is right on GPUs without the type,
and in Triton's interpreter, which would cut the low bits off.
"""

# pyright: reportArgumentType=false, reportInvalidTypeForm=false
# (Triton's annotations are values, and it takes Python numbers for them.)

from __future__ import annotations

import triton
import triton.language as tl

from .ranges import BLOCK_NUMEL

NUM_WARPS = 8  # 16 elements of a block a thread; with 32, one or another Triton spills a register

_BLOCK = tl.constexpr(BLOCK_NUMEL)
_CHUNK_NUMEL = tl.constexpr(512)
_ALIGN_BYTES = tl.constexpr(16)
_ALIGN_NUMEL = tl.constexpr(8)  # of a 16-bit dtype in 16 bytes


@triton.jit
def _itemsize(DTYPE: tl.constexpr):
    return 4 if DTYPE == "float32" else 2


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGN_BYTES: tl.constexpr):
    """Triton keeps the hint only where the cast itself is, and forgets it where a function returns the pointer."""
    if DTYPE == "float32":
        return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGN_BYTES)
    elif DTYPE == "float16":
        return tl.multiple_of(address.to(tl.pointer_type(tl.float16)), ALIGN_BYTES)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint16)), ALIGN_BYTES)


@triton.jit
def _widen(values, DTYPE: tl.constexpr):
    """To fp32, exactly."""
    if DTYPE == "bfloat16":
        return (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def _round_to_bfloat16(values):
    """To nearest, ties to even: 0x7FFF and the lowest bit that stays are added below it. NaN stays NaN."""
    bits = values.to(tl.uint32, bitcast=True)
    upper = bits >> 16
    rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    return tl.where(values == values, rounded, upper | 0x40).to(tl.uint16)


@triton.jit
def _cast(values, SOURCE: tl.constexpr, TARGET: tl.constexpr):
    if SOURCE == TARGET:
        return values
    elif TARGET == "bfloat16":
        return _round_to_bfloat16(_widen(values, SOURCE))
    elif TARGET == "float16":
        return _widen(values, SOURCE).to(tl.float16)
    else:
        return _widen(values, SOURCE)


@triton.jit
def _move_lanes(source_ptr, target_ptr, lanes, count, SOURCE: tl.constexpr, TARGET: tl.constexpr, STORE: tl.constexpr):
    """target[lane] = cast(source[lane]) for the lanes below `count`; the squares of the cast values, in fp64."""
    mask = lanes < count
    values = _cast(tl.load(source_ptr + lanes, mask=mask, other=0), SOURCE, TARGET)
    if STORE:
        tl.store(target_ptr + lanes, values, mask=mask)
    wide = _widen(values, TARGET).to(tl.float64)
    return wide * wide


@triton.jit
def _move_block(
    source, target, count, SOURCE: tl.constexpr, TARGET: tl.constexpr, STORE: tl.constexpr, SUMS: tl.constexpr
):
    """Move `count` elements from address `source` to address `target` if STORE; their sum of squares if SUMS."""
    total = tl.zeros((), tl.float64)
    if (source | target) % _ALIGN_BYTES == 0 and count % _ALIGN_NUMEL == 0:
        source_ptr = _pointer(source, SOURCE, _ALIGN_BYTES)
        target_ptr = _pointer(target, TARGET, _ALIGN_BYTES)
        lanes = tl.arange(0, _BLOCK)
        count = count // _ALIGN_NUMEL * _ALIGN_NUMEL  # the same number, and the compiler sees what divides it
        squares = _move_lanes(source_ptr, target_ptr, lanes, count, SOURCE, TARGET, STORE)
        if SUMS:
            total += tl.sum(squares)
    else:
        source_ptr = _pointer(source, SOURCE, 1)
        target_ptr = _pointer(target, TARGET, 1)
        partial = tl.zeros((_CHUNK_NUMEL,), tl.float64)
        done = 0
        while done < count:  # Triton 3.6 cannot interpret range() of a number it has loaded
            chunk = done + tl.arange(0, _CHUNK_NUMEL)
            partial += _move_lanes(source_ptr, target_ptr, chunk, count, SOURCE, TARGET, STORE)
            done += _CHUNK_NUMEL
        if SUMS:
            total += tl.sum(partial)
    return total


@triton.jit
def _find_row(range_of_program_ptr, ranges_ptr):
    """This program's range and its row: start, stop, offset, first program, first sum less first program."""
    index = tl.load(range_of_program_ptr + tl.program_id(0)).to(tl.int64)
    return index, ranges_ptr + index * 5


@triton.jit
def _find_block(row):
    """Where this program's block starts in the tensor and in the flat buffer, and its number of elements."""
    done = (tl.program_id(0) - tl.load(row + 3)) * _BLOCK  # int64 from here on
    start = tl.load(row) + done
    count = tl.minimum(tl.load(row + 1) - start, _BLOCK).to(tl.int32)
    return start, count, tl.load(row + 2) + done


@triton.jit
def _store_sum(total, sums_ptr, at, flag_ptr, FLAG: tl.constexpr):
    tl.store(sums_ptr + at, total)
    if FLAG:
        tl.store(flag_ptr, 1, mask=(tl.abs(total) < float("inf")) == 0)


@triton.jit(do_not_specialize=["flat"], do_not_specialize_on_alignment=["sums_ptr", "flag_ptr"])
def pack_kernel(
    addresses_ptr,
    range_of_program_ptr,
    ranges_ptr,
    flat: tl.int64,
    sums_ptr,
    flag_ptr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    SUMS: tl.constexpr,
    FLAG: tl.constexpr,
):
    """flat[offset + i] = cast(tensor[start + i]); sums[block + i // BLOCK] += flat[offset + i] ** 2."""
    index, row = _find_row(range_of_program_ptr, ranges_ptr)
    start, count, offset = _find_block(row)
    source = tl.load(addresses_ptr + index) + start * _itemsize(SOURCE)
    target = flat + offset * _itemsize(TARGET)
    total = _move_block(source, target, count, SOURCE, TARGET, True, SUMS)
    if SUMS:
        _, row = _find_row(range_of_program_ptr, ranges_ptr)  # again: kept, it would cost a register too many
        _store_sum(total, sums_ptr, tl.program_id(0) + tl.load(row + 4), flag_ptr, FLAG)


@triton.jit(do_not_specialize=["flat"])
def copy_back_kernel(
    addresses_ptr,
    range_of_program_ptr,
    ranges_ptr,
    flat: tl.int64,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """tensor[start + i] = cast(flat[offset + i])."""
    index, row = _find_row(range_of_program_ptr, ranges_ptr)
    start, count, offset = _find_block(row)
    source = flat + offset * _itemsize(SOURCE)
    target = tl.load(addresses_ptr + index) + start * _itemsize(TARGET)
    _move_block(source, target, count, SOURCE, TARGET, True, False)


@triton.jit(do_not_specialize=["flat", "numel"], do_not_specialize_on_alignment=["sums_ptr", "flag_ptr"])
def grad_stats_kernel(flat: tl.int64, numel: tl.int64, sums_ptr, flag_ptr, DTYPE: tl.constexpr, FLAG: tl.constexpr):
    """sums[i // BLOCK] += flat[i] ** 2."""
    block = tl.program_id(0).to(tl.int64)
    source = flat + block * _BLOCK * _itemsize(DTYPE)
    count = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
    _store_sum(_move_block(source, source, count, DTYPE, DTYPE, False, True), sums_ptr, block, flag_ptr, FLAG)
