"""A damaged checkpoint folder is named on all ranks, before anything has changed."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.rank_processes import run_ranks
from tests.sharding import sharded, whole
from zofftk.errors import InputError
from zofftk.sharding.saving import load_sharded, save_sharded


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "a missing shard": (lambda folder: (folder / "__1_0.distcp").unlink(), FileNotFoundError, "__1_0.distcp"),
    "a flipped bit": (lambda folder: flip(folder / "__1_0.distcp"), InputError, "__1_0.distcp is damaged"),
    "a flipped bit of the small file": (lambda folder: flip(folder / ".metadata"), InputError, ".metadata is damaged"),
    "a truncated shard": (
        lambda folder: os.truncate(folder / "__0_0.distcp", 100),
        InputError,
        "__0_0.distcp is truncated or damaged: expected",
    ),
    "no checksums": (
        lambda folder: (folder / "checksums.json").write_text("{"),
        InputError,
        "checksums.json is damaged",
    ),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), FileNotFoundError, "there is no checkpoint"),
}
# Without the checksums, as after torch's own save.
DAMAGE_OF_TORCHS = {
    "a missing shard": (lambda folder: (folder / "__1_0.distcp").unlink(), FileNotFoundError, "__1_0.distcp"),
    "a truncated shard": (
        lambda folder: os.truncate(folder / "__0_0.distcp", 100),
        InputError,
        "__0_0.distcp is truncated: expected",
    ),
    "code": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(os.system)),
        InputError,
        "it needs posix.system to be loaded",
    ),
    "garbage": (
        lambda folder: (folder / ".metadata").write_bytes(b"garbage"),
        InputError,
        ".metadata is damaged, or not",
    ),
}


def test_b09_damage_is_named_on_all_ranks_before_anything_changes(tmp_path):
    def run(rank):
        value = whole((40, 9), 0)
        for what, (damage, error, because) in [*DAMAGE.items(), *DAMAGE_OF_TORCHS.items()]:
            folder = tmp_path / what
            is_torchs = (damage, error, because) in DAMAGE_OF_TORCHS.values()
            state = {"value": sharded(value, rank, 2, 5), "step": 3}
            save_sharded(state, folder)
            if rank == 0:
                if is_torchs:
                    (folder / "checksums.json").unlink()
                damage(folder)
            dist.barrier()
            state["value"].zero_()
            state["step"] = 0
            with pytest.raises(error, match=because):
                load_sharded(state, folder)
            assert state["step"] == 0
            assert all((part.values == 0).all() for part in state["value"].parts), what
        return True

    assert run_ranks(2, run) == [True, True]


def test_torch_alone_does_not_see_a_flipped_bit(tmp_path):
    """Why there are checksums. If this fails, torch has them now."""
    value = whole((40, 9), 0)
    save_sharded({"value": value}, tmp_path / "ckpt")
    shard = tmp_path / "ckpt" / "__0_0.distcp"
    data = shard.read_bytes()
    at = data.index(value.numpy().tobytes())
    shard.write_bytes(data[: at + 3] + bytes([data[at + 3] ^ 1]) + data[at + 4 :])
    into = torch.zeros(40, 9)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load({"value": into}, checkpoint_id=tmp_path / "ckpt")
    assert (into != value).sum() == 1
    into.zero_()
    with pytest.raises(InputError, match="is damaged"):
        load_sharded({"value": into}, tmp_path / "ckpt")
    assert (into == 0).all()
    load_sharded({"value": into}, tmp_path / "ckpt", check=False)
    assert (into != value).sum() == 1
