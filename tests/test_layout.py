"""The layout covers every element once, whatever the sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zofftk.layout import ALIGN_NUMEL, BLOCK_NUMEL, ParamSpec, build_layout

sizes = st.lists(
    st.tuples(st.one_of(st.integers(0, 200), st.integers(0, 40_000)), st.sampled_from([("bf16", 2), ("fp32", 4)])),
    min_size=1,
    max_size=20,
)


@given(sizes, st.integers(1, 200_000))
def test_pieces_cover_every_parameter_once_and_in_order(sizes, bucket_bytes):
    specs = [ParamSpec(i, numel, wire, itemsize) for i, (numel, (wire, itemsize)) in enumerate(sizes)]
    layout = build_layout(specs, bucket_bytes)
    covered = {spec.index: [] for spec in specs}
    end = block_end = 0
    for bucket in layout.buckets:
        assert bucket.start >= end
        assert bucket.start % ALIGN_NUMEL == 0
        assert bucket.first_block == block_end
        assert bucket.numel * {"bf16": 2, "fp32": 4}[bucket.wire] <= max(bucket_bytes, BLOCK_NUMEL * 4)
        offset = block = 0
        for piece in bucket.pieces:
            assert piece.offset >= offset
            assert piece.offset % ALIGN_NUMEL == 0
            assert piece.block == block
            assert piece.start % BLOCK_NUMEL == 0
            assert bucket.start + piece.offset == layout.param_start[piece.param] + piece.start
            covered[piece.param].append((piece.start, piece.stop))
            offset, block = piece.offset + piece.numel, block + piece.num_blocks
        assert offset <= bucket.numel
        assert block == bucket.num_blocks
        end, block_end = bucket.start + bucket.numel, block_end + bucket.num_blocks
    assert end <= layout.numel
    assert block_end == layout.num_blocks
    for spec in specs:
        ranges = covered[spec.index]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == spec.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert layout.param_blocks[spec.index][1] == -(-spec.numel // BLOCK_NUMEL)


def test_a_bucket_is_filled_before_the_next_is_opened():
    specs = [ParamSpec(i, 3 * BLOCK_NUMEL, "bf16", 2) for i in range(4)]
    layout = build_layout(specs, 4 * BLOCK_NUMEL * 2)
    assert [bucket.numel for bucket in layout.buckets] == [4 * BLOCK_NUMEL] * 3
    assert [piece.param for piece in layout.buckets[0].pieces] == [3, 2]


@pytest.mark.parametrize("numel", [2**31 + 17, 2**40])
def test_sizes_beyond_32_bits(numel):
    layout = build_layout([ParamSpec(0, 5, "bf16", 2), ParamSpec(1, numel, "bf16", 2)], 2**34)
    assert sum(piece.numel for bucket in layout.buckets for piece in bucket.pieces) == numel + 5
    assert layout.param_start[0] >= numel


def test_a_slot_holds_whole_elements_of_every_dtype():
    specs = [ParamSpec(0, 67, "torch.bfloat16", 2), ParamSpec(1, 1, "torch.float32", 4)]
    nbytes, _ = build_layout(specs, 1).slot_size()
    assert nbytes >= 134
    assert nbytes % 8 == 0
