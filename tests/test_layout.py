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


@given(sizes, st.integers(1, 200_000), st.sampled_from([1, 1, 2, 3, 4]))
def test_pieces_cover_every_parameter_once_and_in_order(sizes, bucket_bytes, num_ranks):
    specs = [ParamSpec(i, numel, wire, itemsize) for i, (numel, (wire, itemsize)) in enumerate(sizes)]
    layout = build_layout(specs, bucket_bytes, num_ranks)
    covered = {spec.index: [] for spec in specs}
    end, rank_blocks, before = 0, [0] * num_ranks, 0
    for bucket in layout.buckets:
        itemsize = {"bf16": 2, "fp32": 4}[bucket.wire]
        assert bucket.numel * itemsize <= max(bucket_bytes, num_ranks * BLOCK_NUMEL * itemsize)
        assert len(bucket.shards) == num_ranks
        for rank, shard in enumerate(bucket.shards):
            assert shard.start >= end
            assert shard.start % ALIGN_NUMEL == 0
            assert (shard.numel, shard.start) == (bucket.shards[0].numel, bucket.shards[0].start)
            assert shard.first_block == rank_blocks[rank]
            offset = block = 0
            for piece in shard.pieces:
                assert piece.offset >= offset
                assert piece.offset % ALIGN_NUMEL == 0
                assert piece.block == block
                assert piece.start % BLOCK_NUMEL == 0
                covered[piece.param].append((piece.start, piece.stop))
                offset, block = piece.offset + piece.numel, block + piece.num_blocks
            assert offset <= shard.numel
            assert block == shard.num_blocks
            assert len({piece.param for piece in shard.pieces}) == len(shard.pieces)
            rank_blocks[rank] += block
        check_whole(bucket, before, layout.param_blocks)
        before += bucket.num_blocks
        end = bucket.shards[0].start + bucket.shards[0].numel
    assert end <= layout.numel
    assert (before, tuple(rank_blocks)) == (layout.num_blocks, layout.rank_blocks)
    for spec in specs:
        ranges = covered[spec.index]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == spec.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert layout.param_blocks[spec.index][1] == -(-spec.numel // BLOCK_NUMEL)


def check_whole(bucket, before, param_blocks):
    """The pieces of the bucket are those of its shards."""
    shard_numel = bucket.shards[0].numel
    of_shards = [
        (piece.param, piece.start, piece.stop, rank * shard_numel + piece.offset)
        for rank, shard in enumerate(bucket.shards)
        for piece in shard.pieces
    ]
    assert of_shards == [(piece.param, piece.start, piece.stop, piece.offset) for piece in bucket.pieces]
    for piece in bucket.pieces:
        first, num = param_blocks[piece.param]
        assert first + piece.start // BLOCK_NUMEL == before + piece.block
        assert before + piece.block + piece.num_blocks <= first + num


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_ranks_keep_about_as_much(num_ranks):
    specs = [ParamSpec(i, numel, "bf16", 2) for i, numel in enumerate([1_000_000, 77, 3_000_000, 50_000, 1, 700_000])]
    layout = build_layout(specs, 512 * 1024, num_ranks)
    held = [
        sum(piece.numel for bucket in layout.buckets for piece in bucket.shards[rank].pieces)
        for rank in range(num_ranks)
    ]
    assert max(held) <= 1.02 * sum(held) / num_ranks
    assert layout.numel <= 1.03 * sum(held) / num_ranks


def test_a_bucket_is_filled_before_the_next_is_opened():
    specs = [ParamSpec(i, 3 * BLOCK_NUMEL, "bf16", 2) for i in range(4)]
    layout = build_layout(specs, 4 * BLOCK_NUMEL * 2)
    assert [bucket.numel for bucket in layout.buckets] == [4 * BLOCK_NUMEL] * 3
    assert [piece.param for piece in layout.buckets[0].pieces] == [3, 2]


@pytest.mark.parametrize("numel", [2**31 + 17, 2**40])
def test_sizes_beyond_32_bits(numel):
    layout = build_layout([ParamSpec(0, 5, "bf16", 2), ParamSpec(1, numel, "bf16", 2)], 2**34)
    assert sum(piece.numel for bucket in layout.buckets for piece in bucket.pieces) == numel + 5
    assert layout.buckets[-1].shards[0].start + layout.buckets[-1].numel >= numel


def test_a_slot_holds_whole_elements_of_every_dtype():
    specs = [ParamSpec(0, 67, "torch.bfloat16", 2), ParamSpec(1, 1, "torch.float32", 4)]
    nbytes, _ = build_layout(specs, 1).slot_size()
    assert nbytes >= 134
    assert nbytes % 8 == 0
